"""Memory of the KV pool on a CPU, checked before SGLang takes it."""

import json
from pathlib import Path
from typing import Any

import psutil

from rlpipe.shared.errors import ResourceError
from rollout.arguments import EngineSetup

_KEEP_FREE_BYTES = 512 * 2**20
_BYTES = {"float32": 4, "bfloat16": 2}


def check(setup: EngineSetup, tokens: int) -> None:
    """Raises ResourceError when a pool of `tokens` does not fit into free memory. Linux would kill the engine later."""
    config = json.loads((Path(setup.model_path) / "config.json").read_text())
    per_token = bytes_per_token(config.get("text_config", config), _BYTES[setup.engine.dtype])
    free = psutil.virtual_memory().available - _KEEP_FREE_BYTES
    if tokens * per_token > free:
        fits = max(0, free // per_token)
        raise ResourceError(
            f"engine {setup.index}: no free memory for a KV pool of {tokens} tokens ({tokens * per_token / 2**30:.1f} "
            f"GiB, free: {max(0, free) / 2**30:.1f} GiB); set rollout.engine.kv_cache_tokens to at most {fits}, or "
            "lower rollout.engine.max_running_requests"
        )


def bytes_per_token(config: dict[str, Any], element_bytes: int) -> int:
    """Keys and values of one token in all layers with softmax attention; `config` is config.json's text part."""
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    layers = sum(kind != "linear_attention" for kind in kinds)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * layers * (config.get("num_key_value_heads") or heads) * head_dim * element_bytes
