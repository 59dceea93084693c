"""What SGLang is told so that it makes an engine with FP8 weights."""

import json
import os
from typing import Any

from rlpipe.config.rollout import EngineConfig
from rlpipe.shared.quantization import BLOCK

VARIABLE = "RLPIPE_QUANTIZATION"
"""Environment variable of an engine's processes: `rollout.engine.quantization`."""


def quantization_here() -> str:
    """`rollout.engine.quantization` of the engine that this process belongs to."""
    return os.environ.get(VARIABLE, "none")


def fp8_arguments(engine: EngineConfig) -> dict[str, Any]:
    """Of ServerArgs; empty without FP8.

    SGLang takes the model's folder for one that is stored in FP8 by blocks; rollout/sglang_patches/fp8_model.py
    quantises what it reads of it.
    """
    arguments: dict[str, Any] = {}
    if engine.quantization != "none":
        stored = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
        arguments["json_model_override_args"] = json.dumps({"quantization_config": stored})
        # Qwen3-Next's shared expert would be one more of the others, and have 8 bits with them.
        arguments["disable_shared_experts_fusion"] = engine.quantization == "fp8"
        # SGLang's own choice, DeepGEMM, compiles thousands of kernels with nvcc when it first meets a layer.
        arguments["fp8_gemm_runner_backend"] = "triton"
    if engine.kv_cache_dtype == "fp8":
        arguments["kv_cache_dtype"] = "fp8_e4m3"
    return arguments
