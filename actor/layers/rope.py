"""Rotary position embedding, per token of a pack: positions come with the pack, so no sequence length is ever read.

Su et al. 2021 (https://arxiv.org/abs/2104.09864), in the half-split form of Llama; "llama3" scaling as in transformers.
"""

import math

import torch

from actor.layers.fusion import fused
from rlpipe.model.description import Rope, RopeScaling


def inverse_frequencies(rope: Rope) -> torch.Tensor:
    """Float32 [dimensions / 2] on the CPU."""
    exponents = torch.arange(0, rope.dimensions, 2, dtype=torch.int64).float() / rope.dimensions
    frequencies = 1.0 / (rope.theta**exponents)
    return frequencies if rope.scaling is None else _llama3(frequencies, rope.scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow frequencies divided by `factor`, fast ones kept, a linear blend between (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    blend = (scaling.original_max_positions / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    slow = wavelengths > scaling.original_max_positions / low
    fast = wavelengths < scaling.original_max_positions / high
    return torch.where(slow, frequencies / scaling.factor, torch.where(fast, frequencies, blended))


def cos_sin(frequencies: torch.Tensor, position_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[t, 2, 1, dimensions] of `dtype`: cosine and sine of each token's angles, computed in float32 once per pass."""
    angles = torch.outer(position_ids.float(), frequencies)
    angles = torch.cat((angles, angles), -1)
    return torch.stack((angles.cos(), angles.sin()), 1).unsqueeze(2).to(dtype)


@fused
def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate the leading channels of each head. x: [t, heads, head_dim]; table: `cos_sin` of the same tokens."""
    cos, sin = table[:, 0], table[:, 1]
    dimensions = cos.shape[-1]
    turned, kept = x[..., :dimensions], x[..., dimensions:]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, kept), -1) if kept.shape[-1] else turned
