"""Rows of tokens sorted by expert, their products with the experts' weights, and the way back.

Every row has one place and every token knows its rows, so gradients need no atomic additions.
"""

from typing import Any

import torch
import torch.nn.functional as F

from actor.layers.fusion import computed_by

_KERNELS = "actor.layers.triton_kernels"  # without gradients, which the functions below have


def sort_by_expert(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the choices [t, k] among so many experts: (order, rows, counts), all int64.

    order: [t x k], the choice (token x k + slot) in each row after sorting. rows: [t, k], the row of each choice.
    counts: [experts], rows of each expert.
    """
    sorted_experts, order = chosen.flatten().to(torch.int16).sort(stable=True)
    places = torch.arange(len(order), device=order.device)
    rows = torch.empty_like(order).scatter_(0, order, places).view(chosen.shape)
    every = torch.arange(-1, experts, dtype=torch.int16, device=order.device)
    ends = torch.searchsorted(sorted_experts, every, right=True)
    return order, rows, ends[1:] - ends[:-1]


def arrivals_by_expert(counts: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows that come rank by rank and, from a rank, expert by expert: (order, places), both int64 [total].

    counts: int64 [ranks, experts], how many of each, `total` in all. order: the arrival in each row after sorting by
    expert, those of an expert as they came. places: the row of each arrival. Nothing is read from the device.
    """
    by_rank, by_expert = counts.flatten(), counts.t().flatten()
    first_arrivals = by_rank.cumsum(0) - by_rank
    first_rows = (by_expert.cumsum(0) - by_expert).view(counts.shape[::-1]).t().flatten()
    arrivals = torch.arange(total, device=counts.device)
    places = arrivals + (first_rows - first_arrivals).repeat_interleave(by_rank, output_size=total)
    return torch.empty_like(places).scatter_(0, places, arrivals), places


class ReorderedRows(torch.autograd.Function):
    """Row `order[i]` in row i. rows: [n, ...]; order: int64 [n]; places: its inverse, by which gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradients[0].index_select(0, places), None, None


@computed_by(_KERNELS)
def sum_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """For each token the sum of its rows, in float32. rows: [n, h]; places: int64 [t, k]; returns [t, h]."""
    return _sum(rows, places).to(rows.dtype)


@computed_by(_KERNELS)
def sum_rows_beside(
    rows: torch.Tensor, places: torch.Tensor, shared: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """The same plus `shared` [t, h] x sigmoid(`logits` [t, 1])."""
    return (_sum(rows, places) + shared * torch.sigmoid(logits.float())).to(rows.dtype)


def _sum(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    first, *others = places.unbind(1)
    total = rows.index_select(0, first).float()
    for column in others:
        total = total + rows.index_select(0, column)
    return total


@computed_by(_KERNELS)
def sum_rows_and(
    rows: torch.Tensor, places: torch.Tensor, beside: torch.Tensor, logits: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """`sum_rows` plus `beside` [t, h] plus `logits` [t, 1] x `gate` [h]."""
    return (_sum(rows, places) + beside + logits.float() * gate).to(rows.dtype)


@computed_by(_KERNELS)
def spread_rows(tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Each token once for each of its rows. tokens: [t, h]; rows: int64 [t, k]; returns [t x k, h]."""
    out = tokens.new_empty(rows.numel(), tokens.shape[1])
    return out.index_copy_(0, rows.flatten(), tokens.repeat_interleave(rows.shape[1], 0))


@computed_by(_KERNELS)
def spread_rows_beside(
    gradient: torch.Tensor, rows: torch.Tensor, shared: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`spread_rows` of a gradient, and those of `shared` and `logits` in `sum_rows_beside`."""
    gate = torch.sigmoid(logits.float())
    along = (gradient.float() * shared).sum(-1, keepdim=True)
    of_logits = (along * gate * (1 - gate)).to(logits.dtype)
    return spread_rows(gradient, rows), (gradient * gate).to(shared.dtype), of_logits


class SpreadRows(torch.autograd.Function):
    """Each token once for each of its experts: [t, h] -> [t x k, h] in the order of `sort_by_expert`."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return spread_rows(tokens, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        return sum_rows(gradients[0].contiguous(), rows), None


class SpreadRowsBeside(torch.autograd.Function):
    """`SpreadRows`, and beside it what the expert of every token takes: the tokens, and the logits of its gate [1, h].

    Returns (rows [t x k, h], tokens [t, h], logits [t, 1]). Gradients of all three are added up in one kernel.
    """

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, rows: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(tokens, rows, gate)
        return spread_rows(tokens, rows), tokens.view_as(tokens), F.linear(tokens, gate)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, rows, gate = ctx.saved_tensors
        of_rows, of_tokens, of_logits = (one.contiguous() for one in gradients)
        of_gate = of_logits.t() @ tokens if ctx.needs_input_grad[2] else None
        return sum_rows_and(of_rows, rows, of_tokens, of_logits, gate.flatten()), None, of_gate


class SumRows(torch.autograd.Function):
    """The inverse way: [t x k, h] -> [t, h]."""

    @staticmethod
    def forward(ctx: Any, expert_rows: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return sum_rows(expert_rows, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        return spread_rows(gradients[0], rows), None


class SumRowsBeside(torch.autograd.Function):
    """`SumRows`, and beside it the expert that every token passes; see `sum_rows_beside`."""

    @staticmethod
    def forward(
        ctx: Any, expert_rows: torch.Tensor, rows: torch.Tensor, shared: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, shared, logits)
        return sum_rows_beside(expert_rows, rows, shared, logits)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, shared, logits = ctx.saved_tensors
        of_rows, *others = spread_rows_beside(gradients[0].contiguous(), rows, shared, logits)
        return of_rows, None, *others


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
