"""Attention of one sequence, or of a piece of one to itself and all before it, by cuDNN.

It is causal where queries and keys are as many, and else attends to everything. So a piece attends to keys before it as
a rectangle, and to the rest as a square; both results are weighted by the sums of their exponentials. The gradient of
each is the kernel's own, given what came out of both: as in ring attention (arXiv 2310.01889). A sequence is a piece
that nothing precedes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "torch._C._VariableFunctions:_scaled_dot_product_cudnn_attention",
    why="results of two parts of the keys are added up by the sums of their exponentials, which no public call gives",
    drop_when="torch's scaled_dot_product_attention is causal from the bottom right on cuDNN, or gives these sums",
)
relies_on(
    "torch._meta_registrations:meta__scaled_dot_product_cudnn_backward",
    texts=("_scaled_dot_product_cudnn_attention_backward",),
    why="the gradient of one part takes what came out of both",
    drop_when="as above",
)

Inputs: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value."""

_MERGED_ROWS = 8192
"""Taken in float32 at a time."""


class Kernel(Protocol):
    """Attention of all sequences and heads at once. query: [1, heads, t, d]; key, value: [1, kv_heads, s, d]."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, heads, t, d], and the logarithms of the sums of exponentials, float32 [1, heads, t]."""

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Inputs,
        out: torch.Tensor,
        log_sums: torch.Tensor,
        is_causal: bool,
        scale: float,
    ) -> Inputs:
        """Of query, key and value, where `out` and `log_sums` are those of all keys."""


class CuDnn:
    """cuDNN's, as torch calls it."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, log_sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, is_causal, False, scale=scale
        )
        return out, log_sums.view(out.shape[:3])

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Inputs,
        out: torch.Tensor,
        log_sums: torch.Tensor,
        is_causal: bool,
        scale: float,
    ) -> Inputs:
        query, key, value = inputs
        nothing = torch.zeros((), dtype=torch.int64, device=query.device)  # seeds of a dropout that there is not
        gradients: Inputs
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            gradient,
            query,
            key,
            value,
            out,
            log_sums.unsqueeze(-1),
            nothing,
            nothing,
            None,
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            is_causal,
            scale=scale,
        )
        return gradients

    def plan(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> None:
        """For forward passes over a square or a rectangle of these rows, [t, heads, d] and [s, kv_heads, d], that the
        calling thread runs: torch keeps what cuDNN has planned for each thread apart."""
        q, k, v = (_heads(rows, 0, len(rows)) for rows in (query, key, value))
        self.forward(q, k, v, is_causal, 1.0)

    def plan_backward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> None:
        """The same for backward passes."""
        q, k, v = (_heads(rows, 0, len(rows)) for rows in (query, key, value))
        out, log_sums = torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.float32)
        self.backward(out, (q, k, v), out, log_sums, is_causal, 1.0)


@dataclass(frozen=True)
class Cut:
    """How keys of a piece are divided. before: those of the rectangle. overlap: those that precede the piece and are in
    the square, where as many queries are filled in before it."""

    before: int
    overlap: int

    @classmethod
    def of(cls, queries: int, keys: int) -> "Cut":
        """Of 4 lengths of a rectangle between two powers of two: what overlaps is computed in any case, and filling
        costs half a square of it."""
        start = keys - queries
        step = 1 << max(0, start.bit_length() - 3)
        return cls(start - start % step, start % step)


def rounded_length(tokens: int) -> int:
    """The next of 16 lengths between two powers of two: cuDNN plans a kernel anew for every length, and few lengths are
    worth a few percent of filling."""
    step = 1 << max(0, (tokens - 1).bit_length() - 5)
    return -(-tokens // step) * step


@dataclass(frozen=True)
class Part:
    """Rows of queries that attend to rows of keys; the last query sees the last key."""

    queries: slice
    keys: slice


def long_parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parts: Sequence[Part],
    others: Sequence[tuple[slice, torch.Tensor]],
    scale: float,
    kernel: Kernel = CuDnn(),
) -> torch.Tensor:
    """Attention of each of `parts`, in one tensor with what `others` have for the remaining rows of queries.

    query: [t, heads, d]; key, value: [s, kv_heads, d]; of `others`: [rows, heads, d]; returns [t, heads, d]. What is
    kept for the backward pass are these tensors, the result and its sums of exponentials. Filling, and whatever a
    kernel makes of keys that several queries share, is made anew there: kept in every layer it is gigabytes.
    """
    rows, found = [one for one, _ in others], [one for _, one in others]
    out: torch.Tensor = _LongParts.apply(query, key, value, scale, kernel, parts, rows, *found)
    return out


class _LongParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        kernel: Kernel,
        parts: Sequence[Part],
        other_rows: Sequence[slice],
        *others: torch.Tensor,
    ) -> torch.Tensor:
        ctx.scale, ctx.kernel, ctx.parts, ctx.other_rows = scale, kernel, parts, other_rows
        out = query.new_empty(*query.shape[:2], value.shape[2])
        for rows, other in zip(other_rows, others, strict=True):
            out[rows] = other
        sums = [_attend(*_of(part, query, key, value), out[part.queries], scale, kernel) for part in parts]
        ctx.save_for_backward(query, key, value, out, *sums)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, *sums = ctx.saved_tensors
        (gradient,) = gradients
        found = [torch.zeros_like(one, memory_format=torch.contiguous_format) for one in (query, key, value)]
        for part, log_sums in zip(ctx.parts, sums, strict=True):
            of_out = (gradient[part.queries], out[part.queries], log_sums)
            of_part = _gradients(_of(part, query, key, value), of_out, ctx.scale, ctx.kernel)
            for into, one in zip(_of(part, *found), of_part, strict=True):
                into.copy_(one)
        return *found, None, None, None, None, *(gradient[rows] for rows in ctx.other_rows)


def _of(part: Part, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Inputs:
    return query[part.queries], key[part.keys], value[part.keys]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, into: torch.Tensor, scale: float, kernel: Kernel
) -> torch.Tensor:
    """Writes a part's result [t, heads, d]; returns the logarithms of its sums, float32 [1, heads, t]."""
    cut = Cut.of(len(query), len(key))
    own = slice(cut.overlap, cut.overlap + len(query))
    square, square_sums = kernel.forward(*_square(cut, query, key, value), True, scale)
    out, log_sums = _rows(square)[own], square_sums[..., own]
    if not cut.before:
        into.copy_(out)
        return log_sums
    every, every_sums = kernel.forward(*_rectangle(cut, query, key, value), False, scale)
    every_sums = every_sums[..., : len(query)]
    total = torch.logaddexp(log_sums, every_sums)
    _merge(into, out, (log_sums - total).exp(), _rows(every)[: len(query)], (every_sums - total).exp())
    return total


def _gradients(
    inputs: Inputs, of_out: tuple[torch.Tensor, torch.Tensor, torch.Tensor], scale: float, kernel: Kernel
) -> Inputs:
    """Of a part's query, key and value. of_out: the gradient of its result, the result and the logarithms of its
    sums."""
    gradient, out, log_sums = of_out
    tokens = len(gradient)
    cut = Cut.of(tokens, len(inputs[1]))

    def of(inputs: Inputs, first: int, is_causal: bool) -> Inputs:
        filled = inputs[0].shape[2]
        sums = F.pad(log_sums, (first, filled - first - tokens))
        of_result, result = (_heads(one, first, filled) for one in (gradient, out))
        query, key, value = kernel.backward(of_result, inputs, result, sums, is_causal, scale)
        return _rows(query), _rows(key), _rows(value)

    of_query, *of_keys = of(_square(cut, *inputs), cut.overlap, True)
    of_query = of_query[cut.overlap :][:tokens]
    of_key, of_value = (one[: cut.overlap + tokens] for one in of_keys)
    if cut.before:
        every = of(_rectangle(cut, *inputs), 0, False)
        of_query = of_query + every[0][:tokens]
        of_key, of_value = torch.cat((every[1], of_key)), torch.cat((every[2], of_value))
    return of_query, of_key, of_value


def _square(cut: Cut, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Inputs:
    """Rows filled in at either end are seen by no other query, and see nothing that counts."""
    filled = rounded_length(cut.overlap + len(query))
    later_key, later_value = (_heads(one[cut.before :], 0, filled) for one in (key, value))
    return _heads(query, cut.overlap, filled), later_key, later_value


def _rectangle(cut: Cut, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Inputs:
    earlier_key, earlier_value = (_heads(one[: cut.before], 0, cut.before) for one in (key, value))
    return _heads(query, 0, rounded_length(len(query))), earlier_key, earlier_value


def _heads(rows: torch.Tensor, first: int, filled: int) -> torch.Tensor:
    """[t, heads, d] -> [1, heads, filled, d], with zeros before `first` and at the end."""
    after = filled - first - len(rows)
    whole = F.pad(rows, (0, 0, 0, 0, first, after)) if first or after else rows.contiguous()
    return whole.transpose(0, 1).unsqueeze(0)


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """[1, heads, t, d] -> [t, heads, d]."""
    return heads.squeeze(0).transpose(0, 1)


def _merge(
    into: torch.Tensor, one: torch.Tensor, one_share: torch.Tensor, other: torch.Tensor, other_share: torch.Tensor
) -> None:
    """into, one, other: [t, heads, d]; shares: float32 [1, heads, t]."""
    shares = (share.squeeze(0).T.unsqueeze(-1) for share in (one_share, other_share))
    columns = (into, one, next(shares), other, next(shares))
    for to, first, first_share, second, second_share in zip(*(c.split(_MERGED_ROWS) for c in columns), strict=True):
        to.copy_((first * first_share).addcmul_(second, second_share))
