"""Operations on a CPU whose rows do not depend on how many rows there are.

The math library takes other kernels for one to three rows than for more, and those round differently. Products whose
row count is a multiple of `ROW_TILE` all take the same one, so every product is padded to such a count. Elementwise
functions work on whole vectors and on a rest, and these round differently too; rows of whole vectors have no rest.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

ROW_TILE = 16
_VECTOR = 32
_library: torch.library.Library | None = None  # torch keeps an override only as long as its library object lives


def matrix_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left [rows, inner] @ right [inner, columns]; a row's result is the same for every number of rows."""
    rows = left.shape[0]
    padding = -rows % ROW_TILE
    if padding:
        left = F.pad(left, (0, 0, 0, padding))
    out = left.new_empty(left.shape[0], right.shape[1])
    torch.mm(left, right, out=out)
    return out[:rows]


def by_row(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function`, elementwise, of `x` [..., columns] with few columns."""
    columns = x.shape[-1]
    return function(F.pad(x, (0, -columns % _VECTOR)))[..., :columns]


def _add_matrix_product(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    product = matrix_product(left, right)
    return beta * bias + (product if alpha == 1 else alpha * product)


def install() -> None:
    """Replaces torch's CPU matrix products in this process. Idempotent."""
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        _library.impl("aten::mm", matrix_product, "CPU")
        _library.impl("aten::addmm", _add_matrix_product, "CPU")
