"""What the model tests share: tiny random checkpoints of every family, and transformers' answers for packs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_support import VOCABULARY

from rlpipe.pack import Pack

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

    module = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
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


def in_worker(rank: int, count: int, name: str, *arguments: Any) -> Any:
    """Call a function of `model_workers`, which only workers import: it brings in Megatron."""
    import model_workers

    return getattr(model_workers, name)(rank, count, *arguments)
