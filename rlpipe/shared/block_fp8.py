"""Weights in FP8 by blocks of 128 x 128: their numbers. The format, and which ones: rlpipe/shared/quantization.py."""

from collections.abc import Iterator

import torch

from rlpipe.shared.quantization import BLOCK, is_quantized
from rlpipe.shared.weights import SCALE

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantized(name: str, tensor: torch.Tensor, quantization: str) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor that is quantised as two, its scales second; others as they come."""
    if is_quantized(name, quantization):
        weight, scales = quantize_blocks(tensor)
        yield name, weight
        yield f"{name}{SCALE}", scales
    else:
        yield name, tensor


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn of the same shape [..., rows, columns], and its scales, float32 [..., blocks, blocks]."""
    *stack, rows, columns = weight.shape
    blocks = (*stack, -(-rows // BLOCK), -(-columns // BLOCK))
    numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    scales = torch.empty(blocks, dtype=torch.float32, device=weight.device)
    quantize_into(numbers, scales, weight)
    return numbers, scales


def quantize_into(numbers: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor) -> None:
    """Write both of them, contiguous tensors of `quantize_blocks`' shapes, on the device of `weight`.

    The largest magnitude of a block becomes the largest number of the format; a block of zeros has scale 1. Blocks at
    the edges may be smaller. What is not finite does not become so: with its scale it is infinite or no number.
    """
    matrices = weight.reshape(-1, *weight.shape[-2:]).contiguous()
    flat_numbers, flat_scales = numbers.view(matrices.shape), scales.view(-1, *scales.shape[-2:])
    if weight.is_cuda:
        from rlpipe.shared.block_fp8_kernel import quantize_matrices

        quantize_matrices(matrices, flat_numbers, flat_scales, BLOCK)
    else:
        _quantize_matrices(matrices, flat_numbers, flat_scales)


def _quantize_matrices(matrices: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> None:
    """As rlpipe/shared/block_fp8_kernel.py does it on a GPU, in torch's own operations."""
    rows, columns = matrices.shape[1:]
    edges = (0, -columns % BLOCK, 0, -rows % BLOCK)
    padded = torch.nn.functional.pad(matrices, edges) if any(edges) else matrices
    blocks = padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))  # [matrices, blocks, 128, blocks, 128]
    largest = blocks.abs().amax((2, 4), keepdim=True).float()
    scale = torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))
    whole = (blocks.float() / scale).clamp_(-_LARGEST, _LARGEST).flatten(3, 4).flatten(1, 2)
    numbers.copy_(whole[:, :rows, :columns])
    scales.copy_(scale[:, :, 0, :, 0])
