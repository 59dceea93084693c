"""Rows of tokens sorted by expert, their products with the experts' weights, and the way back.

Both directions gather, so gradients need no atomic additions.
"""

from typing import Any

import torch
import torch.nn.functional as F

from actor.layers.fusion import fused


def sort_by_expert(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the choices [t, k]: (order, rows), both int64.

    order: [t x k], the choice (token x k + slot) in each row after sorting. rows: [t, k], the row of each choice.
    """
    order = chosen.flatten().to(torch.int16).argsort(stable=True)
    places = torch.arange(len(order), device=order.device)
    return order, torch.empty_like(order).scatter_(0, order, places).view(chosen.shape)


@fused
def sum_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """For each token the sum of its rows, in float32. rows: [n, h]; places: int64 [t, k]; returns [t, h]."""
    # Addends written out: of a sum over a dimension the compiler makes a reduction that reads rows across.
    first, *others = places.unbind(1)
    total = rows.index_select(0, first).float()
    for column in others:
        total = total + rows.index_select(0, column)
    return total.to(rows.dtype)


class SpreadRows(torch.autograd.Function):
    """Each token once for each of its experts: [t, h] -> [t x k, h] in the order of `sort_by_expert`."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return tokens.index_select(0, order // rows.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return sum_rows(gradients[0].contiguous(), rows), None, None


class SumRows(torch.autograd.Function):
    """The inverse way: [t x k, h] -> [t, h]."""

    @staticmethod
    def forward(ctx: Any, expert_rows: torch.Tensor, order: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.experts_per_token = rows.shape[1]
        return sum_rows(expert_rows, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradients[0].index_select(0, order // ctx.experts_per_token), None, None


def grouped_product(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows `offsets[e - 1]` to `offsets[e]` of x [n, in] times weight[e] transposed; weight: [experts, out, in].

    The kernel wants rows of a multiple of 16 bytes; other sizes (only tiny models have them) are filled with zeros.
    """
    multiple = 16 // x.element_size()
    wide, deep = -weight.shape[1] % multiple, -weight.shape[2] % multiple
    if not wide and not deep:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)
    filled = F.grouped_mm(F.pad(x, (0, deep)), F.pad(weight, (0, deep, 0, wide)).transpose(1, 2), offs=offsets)
    return filled[:, : weight.shape[1]].contiguous()
