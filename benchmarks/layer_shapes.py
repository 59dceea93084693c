"""Shapes of what benchmarks measure: models as `config.json` has them, and packs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.shared.pack import Pack

_CONFIG = Path(__file__).resolve().parent.parent / "configs/models/Qwen3.5-35B-A3B/config.json"

_TINY = {
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def hybrid_config(layers: int, vocabulary: int, tiny: bool) -> dict[str, Any]:
    """`config.json` of the text model with its first `layers` layers and a vocabulary of another size.

    Every fourth layer is softmax attention, the others Gated DeltaNet. tiny: small widths, so that a CPU runs it.
    """
    config = text_model(json.loads(_CONFIG.read_text()))
    config |= {
        "num_hidden_layers": layers,
        "layer_types": config["layer_types"][:layers],
        "vocab_size": vocabulary,
        "eos_token_id": vocabulary - 1,
    }
    return config | _TINY if tiny else config


def tiny_model(config: dict[str, Any]) -> dict[str, Any]:
    """`config.json` with small widths, few layers and as many tokens as the bytes and a few more need.

    Four layers are one period of a hybrid policy.
    """
    small = {name: value for name, value in _TINY.items() if name in config}
    small |= {"intermediate_size": 128} if "intermediate_size" in config else {}
    small |= {"layer_types": config["layer_types"][:4]} if "layer_types" in config else {}
    return config | small | {"num_hidden_layers": 4, "vocab_size": 1024, "bos_token_id": 257, "eos_token_id": 256}


def text_model(config: dict[str, Any]) -> dict[str, Any]:
    """`config.json` of the text model alone, of one that sees pictures too."""
    text = config.get("text_config")
    if text is None:
        return config
    names = [name.replace("ForConditionalGeneration", "ForCausalLM") for name in config["architectures"]]
    return {**text, "architectures": names, "tie_word_embeddings": config["tie_word_embeddings"]}


def qwen3_config(tiny: bool) -> dict[str, Any]:
    """`config.json` of a dense model with the shape of Qwen3-0.6B, or of a tiny one."""
    small = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320}
    large = {"hidden_size": 1024, "head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8}
    large |= {"intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936}
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "eos_token_id": 256,
        "pad_token_id": 257,
        **(small if tiny else large),
    }


def random_pack(lengths: Sequence[int], vocabulary: int) -> Pack:
    """Sequences of random tokens, none of which is trained."""
    total = sum(lengths)
    zeros = np.zeros(total, np.float32)
    token_ids = np.random.default_rng(0).integers(0, vocabulary, total)
    ends = (0, *np.cumsum(lengths).tolist())
    return Pack(
        sample_ids=tuple(str(index) for index in range(len(lengths))),
        token_ids=token_ids,
        targets=token_ids,
        position_ids=np.concatenate([np.arange(length) for length in lengths]),
        loss_mask=zeros,
        loss_weights=zeros,
        advantages=zeros,
        rollout_logprobs=zeros,
        cu_seqlens=ends,
        cu_seqlens_padded=ends,
    )
