"""Which weights of a model are quantised for engines, by `rollout.engine.quantization`.

Experts, or experts, attention projections and feed-forward layers; embedding, head, norms, routers, gates and Gated
DeltaNet stay as they are. The format is that of DeepSeek-V3's checkpoints (arXiv 2412.19437, section 3.3): a weight in
float8_e4m3fn, by blocks of 128 x 128, and `weight_scale_inv`, float32 [rows / 128, columns / 128], with which it is
multiplied.
"""

import re

from rlpipe.shared.weights import SCALE, TensorSpec

BLOCK = 128
"""Rows and columns of a block that has a scale of its own."""

_FEED_FORWARD = r"mlp\.(?:shared_expert\.|experts\.\d+\.)?(?:gate|up|gate_up|down)_proj"
_PROJECTION = rf"self_attn\.(?:[qkvo]|qkv)_proj|{_FEED_FORWARD}"
_STACKED = r"mlp\.experts\.(?:\d+-\d+\.)?(?:gate_up|down)_proj"
_EXPERT = r"mlp\.experts\.\d+\.(?:gate|up|down)_proj\.weight"
_WEIGHTS = {
    "fp8_all": re.compile(rf"(?:^|\.)(?:(?:{_PROJECTION})\.weight|{_STACKED})$"),
    "fp8": re.compile(rf"(?:^|\.)(?:{_EXPERT}|{_STACKED})$"),
}
_MODULES = {
    "fp8_all": re.compile(rf"(?:^|\.)(?:{_PROJECTION}|mlp\.experts)$"),
    "fp8": re.compile(r"(?:^|\.)mlp\.experts$"),
}
_OTHER_TOWERS = ("visual.", "vision_tower.")


def is_quantized(name: str, quantization: str) -> bool:
    """Of a tensor, by its Hugging Face name. quantization: `rollout.engine.quantization`."""
    return _is_meant(_WEIGHTS, name, quantization)


def is_quantized_module(prefix: str, quantization: str) -> bool:
    """The same of a module of SGLang, by its path."""
    return _is_meant(_MODULES, prefix, quantization)


def specs_as_sent(spec: TensorSpec, quantization: str) -> tuple[TensorSpec, ...]:
    """What engines get of a tensor: itself, or its 8 bits and their scales."""
    if not is_quantized(spec.name, quantization):
        return (spec,)
    *stack, rows, columns = spec.shape
    blocks = (*stack, -(-rows // BLOCK), -(-columns // BLOCK))
    return (
        TensorSpec(spec.name, "float8_e4m3fn", spec.shape),
        TensorSpec(f"{spec.name}{SCALE}", "float32", blocks),
    )


def _is_meant(rules: dict[str, re.Pattern[str]], name: str, quantization: str) -> bool:
    if quantization == "none" or any(tower in name for tower in _OTHER_TOWERS):
        return False
    return rules[quantization].search(name) is not None
