"""Policies whose next token is mostly known from the last one, so that a draft can be right, and the same each time."""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3Config, Qwen3ForCausalLM

VOCABULARY, HIDDEN = 512, 256
_HEAD_SCALE = 0.45
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "eos_token_id": 500,
    "pad_token_id": 501,
    "bos_token_id": None,
    "initializer_range": 0.05,
}


def save_dense(folder: Path, seed: int) -> str:
    """A Qwen3 of two layers."""
    torch.manual_seed(seed)
    config = Qwen3Config(**_COMMON, intermediate_size=512, num_hidden_layers=2)
    return _save(Qwen3ForCausalLM(_plain(config)), folder, seed)


def save_hybrid(folder: Path, seed: int, drafts_well: bool = True) -> str:
    """A Qwen3.5-MoE of three Gated DeltaNet layers and one of softmax attention, with a prediction layer that looks at
    the next token's embedding, or, where it does not `drafts_well`, at nothing in particular."""
    torch.manual_seed(seed)
    config = Qwen3_5MoeTextConfig(
        **_COMMON,
        num_hidden_layers=4,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    _save(Qwen3_5MoeForCausalLM(_plain(config)), folder, seed)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    last = "model.layers.3."
    drafting = {f"mtp.layers.0.{name[len(last) :]}": one for name, one in tensors.items() if name.startswith(last)}
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        drafting[f"mtp.{name}.weight"] = torch.zeros(HIDDEN)
    looks = torch.eye(HIDDEN) if drafts_well else torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5
    drafting["mtp.fc.weight"] = torch.cat((looks, 0.02 * torch.randn(HIDDEN, HIDDEN)), dim=1)
    save_file({name: one.contiguous().clone() for name, one in (tensors | drafting).items()}, file)
    more = {"mtp_num_hidden_layers": 1, "full_attention_interval": 4}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | more))
    return str(folder)


def _plain(config: PretrainedConfig) -> PretrainedConfig:
    config._attn_implementation = "eager"
    return config


def _save(model, folder: Path, seed: int) -> str:
    """With embeddings of root mean square 1, and a head that finds the token after each in a cycle of the seed."""
    embedding = torch.randn(VOCABULARY, HIDDEN)
    following = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    model.model.embed_tokens.weight.data.copy_(embedding)
    model.lm_head.weight.data[following] = _HEAD_SCALE * embedding / embedding.norm(dim=-1, keepdim=True)
    model.float().save_pretrained(folder)
    return str(folder)


def reference_logprobs(folder: str, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float):
    """Natural log of softmax(logits / temperature) of each response token, by transformers in float32, on the host."""
    logits = _logits(folder, torch.tensor([prompt + response]))[0] / temperature
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(-1, torch.tensor(response)[:, None].to(rows.device)).squeeze(-1).cpu()


def reference_samples(folder: str, prompt: tuple[int, ...], shape: torch.Size, sampling: dict) -> torch.Tensor:
    """Responses [count, tokens] of `shape`, drawn from what transformers computes."""
    torch.manual_seed(5)
    rows = torch.tensor([prompt]).repeat(shape[0], 1)
    for _ in range(shape[1]):
        probs, order = (_logits(folder, rows)[:, -1] / sampling["temperature"]).softmax(-1).sort(descending=True)
        probs[probs.cumsum(-1) - probs > sampling.get("top_p", 1.0)] = 0
        rows = torch.cat((rows, order.gather(1, torch.multinomial(probs, 1)).cpu()), 1)
    return rows[:, len(prompt) :]


@torch.no_grad()
def _logits(folder: str, rows: torch.Tensor) -> torch.Tensor:
    model = _loaded(folder)
    return model(rows.to(model.device)).logits


@cache
def _loaded(folder: str):
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hybrid

    for kernel in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "FusedRMSNormGated"):
        setattr(hybrid, kernel, None)  # plain torch in their place, also where FLA is installed
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model.to("cuda" if torch.cuda.is_available() else "cpu")
