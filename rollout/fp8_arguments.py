"""What SGLang is told so that it makes an engine with FP8 weights, and what cannot be one."""

import json

from rlpipe.config.rollout import EngineConfig
from rlpipe.shared.errors import ConfigError
from rollout.engine_environment import DeviceKind

_BLOCK = 128


def stored_in_fp8() -> str:
    """SGLang's `json_model_override_args` by which it takes a folder for one that is stored in FP8 by blocks
    (rollout/sglang_patches/fp8_model.py quantises what it reads of it)."""
    stored = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]}
    return json.dumps({"quantization_config": stored})


def check_fp8_device(device: DeviceKind, engine: EngineConfig) -> None:
    """Raise ConfigError for FP8 on a CPU."""
    chosen = {"quantization": engine.quantization, "kv_cache_dtype": engine.kv_cache_dtype}
    for name, value in chosen.items():
        if value == "fp8" and device == "cpu":
            raise ConfigError(
                f"rollout.engine.{name} is 'fp8', for which a CPU engine has no kernels: leave it out there"
            )
