"""Frozen weights that lie in memory as 8-bit floats and are multiplied in the dtype of the others.

A weight is E4M3 with a power of two for every `BLOCK_COLUMNS` columns of a row, as in MXFP8 (OCP Microscaling Formats
1.0). Its values are exact in bfloat16, and but for the smallest of a block they do not depend on where blocks begin, so
that every parallel layout has the same. It is made whole for each product, forward and backward, and dropped after it:
storage shrinks to about half of bfloat16's, and no kernel has to know.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

BLOCK_COLUMNS = 32
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class _Packing:
    """exponents: of the blocks' powers of two, int8 [..., rows, blocks]. dtype: of the whole weight."""

    exponents: Tensor
    dtype: torch.dtype


@torch.no_grad()
def pack(weight: torch.nn.Parameter) -> None:
    """Round a frozen weight [..., rows, columns] to 8 bits, in place of what it was."""
    blocks = _blocks(weight.data.float())
    exponents = torch.frexp(blocks.abs().amax(-1) / _LARGEST).exponent.clamp(-126, 126)
    values = torch.ldexp(blocks, -exponents[..., None]).to(torch.float8_e4m3fn)
    packing = _Packing(exponents.to(torch.int8), weight.dtype)
    weight.data = values.flatten(-2)[..., : weight.shape[-1]].contiguous()
    weight.packing = packing  # type: ignore[attr-defined]


@torch.no_grad()
def whole(weight: Tensor) -> Tensor:
    """A packed weight in its own dtype; any other tensor as it is."""
    packing: _Packing | None = getattr(weight, "packing", None)
    if packing is None:
        return weight.detach()
    values = torch.ldexp(_blocks(weight.detach().to(packing.dtype)), packing.exponents[..., None])
    return values.flatten(-2)[..., : weight.shape[-1]]


def used_whole(weight: Tensor) -> AbstractContextManager[Tensor]:
    """Within the block the whole weight, which a backward pass of products made there makes again for itself."""
    return _made_again(weight) if hasattr(weight, "packing") else nullcontext(weight)


@contextmanager
def _made_again(weight: Tensor) -> Iterator[Tensor]:
    made = whole(weight)
    address = made.untyped_storage().data_ptr()

    def keep(tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != address:
            return tensor
        place = tensor.size(), tensor.stride(), tensor.storage_offset()
        return lambda: whole(weight).as_strided(*place)

    def make(kept: Tensor | Callable[[], Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()

    with saved_tensors_hooks(keep, make):
        yield made


def _blocks(weight: Tensor) -> Tensor:
    """[..., rows, blocks, BLOCK_COLUMNS], the last block filled with zeros."""
    missing = -weight.shape[-1] % BLOCK_COLUMNS
    filled = F.pad(weight, (0, missing)) if missing else weight
    return filled.unflatten(-1, (-1, BLOCK_COLUMNS))
