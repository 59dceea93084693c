"""Weights in FP8 by blocks of 128 x 128: which ones, and their numbers.

Experts are quantised, or experts, attention projections and feed-forward layers; embedding, head, norms, routers, gates
and Gated DeltaNet stay as they are. The format is that of DeepSeek-V3's checkpoints (arXiv 2412.19437, section 3.3): a
weight in float8_e4m3fn and `weight_scale_inv`, float32 [rows / 128, columns / 128], with which it is multiplied.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator

import torch

from rollout.fp8_arguments import BLOCK

SCALE = "_scale_inv"
VARIABLE = "RLPIPE_QUANTIZATION"
"""Environment variable of an engine's processes: `rollout.engine.quantization`."""

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
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


def quantization_here() -> str:
    """`rollout.engine.quantization` of the engine that this process belongs to."""
    return os.environ.get(VARIABLE, "none")


def is_quantized(name: str, quantization: str) -> bool:
    """Of a tensor, by its Hugging Face name. quantization: `rollout.engine.quantization`."""
    return _is_meant(_WEIGHTS, name, quantization)


def is_quantized_module(prefix: str, quantization: str) -> bool:
    """The same of a module of SGLang, by its path."""
    return _is_meant(_MODULES, prefix, quantization)


def _is_meant(rules: dict[str, re.Pattern[str]], name: str, quantization: str) -> bool:
    if quantization == "none" or any(tower in name for tower in _OTHER_TOWERS):
        return False
    return rules[quantization].search(name) is not None


def quantized(
    tensors: Iterable[tuple[str, torch.Tensor]],
    quantization: str,
    place: Callable[[str, torch.Size], torch.Tensor | None] = lambda name, shape: None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor that is quantised as two, its scale after it; others as they come.

    place: where the 8 bits of a tensor belong, if that is known; they are written there, and only the scale is left to
    be loaded.
    """
    for name, tensor in tensors:
        if is_quantized(name, quantization):
            target = place(name, tensor.shape)
            weight, scale = quantize_blocks(tensor, target)
            if target is None:
                yield name, weight
            yield f"{name}{SCALE}", scale
        else:
            yield name, tensor


def quantize_blocks(weight: torch.Tensor, target: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn of the same shape [..., rows, columns], in `target` if there is one, and its scales, float32
    [..., blocks, blocks].

    The largest magnitude of a block becomes the largest number of the format; a block of zeros has scale 1. Blocks at
    the edges may be smaller. What is not finite does not become so: with its scale it is infinite or no number.
    """
    rows, columns = weight.shape[-2:]
    matrices = weight.reshape(-1, rows, columns).contiguous()
    numbers = torch.empty_like(matrices, dtype=torch.float8_e4m3fn) if target is None else target.view(matrices.shape)
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    scales = torch.empty((len(matrices), *blocks), dtype=torch.float32, device=weight.device)
    if weight.is_cuda:
        from rollout.weights.block_fp8_kernel import quantize_matrices

        quantize_matrices(matrices, numbers, scales, BLOCK)
    else:
        _quantize_into(matrices, numbers, scales)
    return numbers.view(weight.shape), scales.view(*weight.shape[:-2], *blocks)


def _quantize_into(matrices: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> None:
    """As rollout/weights/block_fp8_kernel.py does it on a GPU, in torch's own operations."""
    rows, columns = matrices.shape[1:]
    edges = (0, -columns % BLOCK, 0, -rows % BLOCK)
    padded = torch.nn.functional.pad(matrices, edges) if any(edges) else matrices
    blocks = padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))  # [matrices, blocks, 128, blocks, 128]
    largest = blocks.abs().amax((2, 4), keepdim=True).float()
    scale = torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))
    whole = (blocks.float() / scale).clamp_(-_LARGEST, _LARGEST).flatten(3, 4).flatten(1, 2)
    numbers.copy_(whole[:, :rows, :columns])
    scales.copy_(scale[:, :, 0, :, 0])
