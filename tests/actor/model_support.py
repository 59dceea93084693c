"""What the model tests share: tiny random checkpoints of every family, and transformers' answers for packs."""

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_support import VOCABULARY

from rlpipe.shared.pack import Pack

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {"shared_expert_intermediate_size": 32}


@dataclass(frozen=True)
class TinyModel:
    """A configuration of transformers: model type and what differs from `SIZES` (None removes a key)."""

    name: str
    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        from transformers import CONFIG_MAPPING

        merged = {key: value for key, value in (SIZES | self.changes).items() if value is not None}
        return CONFIG_MAPPING[self.model_type](**merged)


# The four kinds of layer stacks of the parity matrix.
DENSE = TinyModel("dense", "qwen3")
MOE = TinyModel("moe", "qwen3_moe", EXPERTS | {"norm_topk_prob": True})
GDN = TinyModel("gdn", "qwen3_5_text", HYBRID)
GDN_MOE = TinyModel("gdn_moe", "qwen3_5_moe_text", HYBRID | EXPERTS | SHARED | {"intermediate_size": None})


def write_checkpoint(model: TinyModel, folder: Path) -> Path:
    """Random weights, large enough that every parameter matters, saved as transformers saves them."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(len(model.name))
    module = AutoModelForCausalLM.from_config(model.config(), attn_implementation="eager").float()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
            if "norm" in name and "qwen3_5" not in model.model_type and "next" not in model.model_type:
                parameter.add_(1.0)
            if name.endswith(("A_log", "linear_attn.norm.weight")):
                parameter.abs_().add_(0.5)
    module.save_pretrained(folder / model.name)
    return folder / model.name


def transformers_answer(path: Path, pack: Pack) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of all targets, one sequence at a time, and the gradients of their weighted sum.

    The experts' gradients come under the names of one matrix per expert, as saved.
    """
    from transformers import AutoModelForCausalLM

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **plain)
    module.train()
    parts = []
    for start, end in pairwise(pack.cu_seqlens_padded):
        logits = module(torch.from_numpy(pack.token_ids[start:end])[None], use_cache=False).logits[0].float()
        wanted = torch.from_numpy(pack.targets[start:end])
        parts.append(torch.log_softmax(logits, -1).gather(1, wanted[:, None])[:, 0])
    logprobs = torch.cat(parts)
    (logprobs * torch.from_numpy(weights_of(pack))).sum().backward()
    gradients = {}
    for name, parameter in module.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients.update(_per_expert(name, gradient))
    return logprobs.detach(), gradients


def weights_of(pack: Pack) -> np.ndarray:
    """A different weight per token, so that no gradient can cancel by symmetry."""
    return np.cos(np.arange(len(pack.token_ids))).astype(np.float32) * pack.loss_mask


def _per_expert(name: str, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """transformers stacks experts in memory and saves them apart."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: gradient}
    root, kind = name.rsplit(".", 1)
    halves: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"down_proj": lambda x: x}
    if kind == "gate_up_proj":
        halves = {"gate_proj": lambda x: x.chunk(2)[0], "up_proj": lambda x: x.chunk(2)[1]}
    return {
        f"{root}.{expert}.{half}.weight": take(gradient[expert])
        for expert in range(gradient.shape[0])
        for half, take in halves.items()
    }


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def write_tensors(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A copy of a model folder with other tensors."""
    from safetensors.torch import save_file

    target.mkdir(parents=True)
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def fuse_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The stacked layout of published Qwen3.5-MoE checkpoints: experts.gate_up_proj and experts.down_proj."""
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    roots = sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name})
    for root in roots:
        count = len({name.split(".")[5] for name in tensors if name.startswith(root + ".experts.")})
        parts = [
            [tensors[f"{root}.experts.{i}.{half}_proj.weight"] for half in ("gate", "up", "down")] for i in range(count)
        ]
        fused[root + ".experts.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in parts])
        fused[root + ".experts.down_proj"] = torch.stack([down for _, _, down in parts])
    return fused


def wrap_in_vision_language(source: Path, target: Path) -> Path:
    """A Qwen3.5-MoE checkpoint as published: nested text configuration and names, and a whole vision tower beside.

    No image processor is there: training on text needs none.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

    text = json.loads((source / "config.json").read_text())
    text.pop("architectures")
    # SGLang reads it; transformers does not write it.
    text["full_attention_interval"] = text["layer_types"].index("full_attention") + 1
    sizes = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8}
    vision = {**sizes, "out_hidden_size": text["hidden_size"], "num_position_embeddings": 16}
    config = CONFIG_MAPPING["qwen3_5_moe"](text_config=text, vision_config=vision, tie_word_embeddings=False)
    tower = Qwen3_5MoeVisionModel(config.vision_config).float().state_dict()
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in read_tensors(source).items()
    }
    write_tensors(source, target, tensors | {f"model.visual.{name}": tensor for name, tensor in tower.items()})
    wrapper = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": config.vision_config.to_dict(),
        "image_token_id": VOCABULARY - 1,
    }
    (target / "config.json").write_text(json.dumps(wrapper))
    return target


def add_mtp(source: Path, target: Path) -> Path:
    """A copy of a hybrid checkpoint with a random multi-token-prediction layer like its last full-attention layer."""
    generator = torch.Generator().manual_seed(9)
    tensors = read_tensors(source)
    last = max(int(name.split(".")[2]) for name in tensors if ".self_attn." in name)
    prefix = f"model.layers.{last}."
    layer = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    hidden = tensors["model.norm.weight"].shape[0]
    shapes = {f"mtp.layers.0.{name}": tensor.shape for name, tensor in layer.items()}
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
    mtp = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    return write_tensors(source, target, tensors | mtp)


def mtp_answer(path: Path, packs: Sequence[Pack]) -> tuple[float, dict[str, torch.Tensor]]:
    """sum(next weight * -log p(token after next)), and its gradients for the `mtp.*` tensors.

    transformers has no multi-token prediction, but its layer is a model of one full-attention layer whose input is
    the projection of the normed next embedding and the normed hidden state (DeepSeek-V3, arXiv:2412.19437, sec. 2.2).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    tensors = read_tensors(path)
    trunk = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    config = AutoConfig.from_pretrained(path, num_hidden_layers=1, layer_types=["full_attention"])
    single = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    stored = {name.replace("mtp.", "model.", 1): t for name, t in tensors.items() if name.startswith("mtp.layers")}
    experts = fuse_experts(stored | {"model.norm.weight": tensors["mtp.norm.weight"]})
    single.load_state_dict(experts | {"lm_head.weight": tensors["lm_head.weight"]}, strict=False)
    own = {
        name: tensors[f"mtp.{name}.weight"].requires_grad_()
        for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    embedding = tensors["model.embed_tokens.weight"]
    loss = torch.zeros(())
    sequences = [(pack, start, end) for pack in packs for start, end in pairwise(pack.cu_seqlens_padded)]
    for pack, start, end in sequences:
        ids, targets = (torch.from_numpy(x[start:end]) for x in (pack.token_ids, pack.targets))
        weights = torch.from_numpy(pack.loss_weights[start:end])
        with torch.no_grad():
            hidden = trunk.model(ids[None], use_cache=False).last_hidden_state
        normed = [
            _zero_centered_norm(x, own[f"pre_fc_norm_{name}"], config.rms_norm_eps)
            for name, x in (("embedding", embedding[targets][None]), ("hidden", hidden))
        ]
        logits = single(inputs_embeds=torch.cat(normed, -1) @ own["fc"].t(), use_cache=False).logits[0]
        after_next = torch.cat((targets[1:], targets[:1] * 0))
        next_weights = torch.cat((weights[1:], weights[:1] * 0))
        loss = loss + (torch.nn.functional.cross_entropy(logits, after_next, reduction="none") * next_weights).sum()
    loss.backward()
    found = {f"mtp.{name}.weight": tensor.grad for name, tensor in own.items()}
    found["mtp.norm.weight"] = single.model.norm.weight.grad
    for name, parameter in single.model.layers[0].named_parameters():
        found |= _per_expert(f"mtp.layers.0.{name}", parameter.grad)
    return float(loss.detach()), found


def _zero_centered_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), 1.0 + weight, epsilon)


def in_worker(rank: int, count: int, *calls: tuple[Any, ...]) -> list[Any]:
    """Call functions of `model_workers`, or of "module.function", each given as (name, arguments ...); only workers
    import those modules, because they bring in Megatron. One worker for many calls: its imports cost more than they
    do."""
    answers = []
    for name, *arguments in calls:
        module, _, function = name.rpartition(".")
        answers.append(getattr(importlib.import_module(module or "model_workers"), function)(rank, count, *arguments))
    return answers
