"""From the joint projection of Gated DeltaNet to what its delta rule takes, as one Triton kernel a section.

Convolution, SiLU and the norm of queries and keys move a tensor once where separate operators move it six times, and
the gradients of all sections are written where the projection's own gradient wants them, so that nothing is joined
afterwards. Imported only where Triton is there; `gdn_torch.projected_heads` is the same in plain torch.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from actor.layers.gdn_torch import split_sections

_ROWS, _WARPS = 32, 8
_STRETCH_STEPS, _ROWS_AHEAD = 128, 4
_EPSILON: tl.constexpr = tl.constexpr(1e-6)
# Lengths of packs differ: Triton would compile anew for those that are, and are not, multiples of 16.
_ANY_LENGTH = ["tokens"]


class ProjectedHeads(torch.autograd.Function):
    """See `GdnKernels.heads`. places: int32 [T], each token's index within its sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        projected: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        value_weight: torch.Tensor,
        places: torch.Tensor,
        key_channels: int,
        value_channels: int,
    ) -> tuple[torch.Tensor, ...]:
        weights = (query_weight, key_weight, value_weight)
        ctx.save_for_backward(projected, places, *weights)
        ctx.channels = (key_channels, key_channels, value_channels)
        sections = split_sections(projected, weights)
        heads = []
        for index, (x, weight, channels) in enumerate(zip(sections, weights, ctx.channels, strict=False)):
            out = x.new_empty(x.shape[0], x.shape[1] // channels, channels)
            grid = (triton.cdiv(len(x), _ROWS), out.shape[1])
            _convolve[grid](
                x,
                x.stride(0),
                weight.t().contiguous(),
                places,
                out,
                len(x),
                x.shape[1],
                ROWS=_ROWS,
                **_shape(weight, channels, unit=index < 2),
                num_warps=_WARPS,
            )
            heads.append(out)
        return (*heads, *sections[3:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        projected, places, *weights = ctx.saved_tensors
        whole = torch.empty_like(projected)
        sections, targets = split_sections(projected, weights), split_sections(whole, weights)
        weight_gradients = [
            _section_gradient(x, weight, places, gradient.contiguous(), target, unit=index < 2)
            for index, (x, weight, gradient, target) in enumerate(
                zip(sections, weights, gradients, targets, strict=False)
            )
        ]
        for target, gradient in zip(targets[3:], gradients[3:], strict=True):
            target.copy_(gradient)
        return (whole, *weight_gradients, None, None, None)


def _section_gradient(
    x: torch.Tensor,
    weight: torch.Tensor,
    places: torch.Tensor,
    gradient: torch.Tensor,
    target: torch.Tensor,
    unit: bool,
) -> torch.Tensor:
    """Writes the gradient of `x` into `target`; returns that of `weight`. gradient: [T, heads, channels]."""
    tokens, heads, channels = gradient.shape
    width = weight.shape[1]
    own = _STRETCH_STEPS - (width - 1)
    stretches = triton.cdiv(tokens, own)
    parts = gradient.new_empty(stretches, width, len(weight), dtype=torch.float32)
    _gradients[stretches, heads](
        x,
        x.stride(0),
        weight.t().contiguous(),
        places,
        gradient,
        target,
        target.stride(0),
        parts,
        tokens,
        heads * channels,
        TOKENS=own,
        AHEAD=_ROWS_AHEAD,
        **_shape(weight, channels, unit),
        num_warps=1,
    )
    return parts.sum(0).t().to(weight.dtype)


def _shape(weight: torch.Tensor, channels: int, unit: bool) -> dict[str, Any]:
    return {
        "CHANNELS": channels,
        "WIDTH": weight.shape[1],
        "UNIT": unit,
        "COLUMNS": triton.next_power_of_2(channels),
    }


@triton.jit
def _convolution(
    x, x_stride, taps, token, place, channel, exists, row_width,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Float32 [ROWS, COLUMNS]: the sum of the last WIDTH tokens of the same sequence, weighted by taps [WIDTH, c]."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for back in tl.static_range(WIDTH):
        seen = (place >= back)[:, None] & exists[None, :]
        row = tl.load(x + (token - back)[:, None] * x_stride + channel[None, :], mask=seen, other=0.0)
        factor = tl.load(taps + (WIDTH - 1 - back) * row_width + channel, mask=exists, other=0.0)
        total += row.to(tl.float32) * factor.to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=_ANY_LENGTH)
def _convolve(
    x, x_stride, taps, places, out, tokens, row_width,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = tl.arange(0, COLUMNS) < CHANNELS
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, COLUMNS)
    place = tl.load(places + token, mask=token < tokens, other=-1)
    total = _convolution(x, x_stride, taps, token, place, channel, inside, row_width, WIDTH, ROWS, COLUMNS)
    y = total * tl.sigmoid(total)
    if UNIT:
        y = y * tl.rsqrt(tl.sum(y * y, 1) + _EPSILON)[:, None]
    kept = (token < tokens)[:, None] & inside[None, :]
    tl.store(out + token[:, None] * row_width + channel[None, :], y.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=_ANY_LENGTH)
def _gradients(
    x, x_stride, taps, places, gradient, target, target_stride, parts, tokens, row_width,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, TOKENS: tl.constexpr, AHEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """The gradient of the convolution's input, and a stretch's part of the weight's: float32 [stretches, WIDTH, c].

    One pass over a stretch of TOKENS, token after token, so that every row is read once: the rows that a token's
    convolution sees are still in registers, and a row's gradient is written when the last token that saw it has given
    its part. The WIDTH - 1 tokens behind a stretch give to its rows alone. AHEAD rows are read at a time, before the
    writes that reading must not pass.
    """
    first = tl.program_id(0).to(tl.int64) * TOKENS
    exist = tl.minimum(tokens - first, TOKENS + WIDTH).to(tl.int32)
    own = tl.minimum(exist, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, COLUMNS)
    inside = tl.full((COLUMNS,), 1, tl.int1) if COLUMNS == CHANNELS else tl.arange(0, COLUMNS) < CHANNELS
    x += first * x_stride
    gradient += first * row_width
    target += first * target_stride
    parts += tl.program_id(0).to(tl.int64) * WIDTH * row_width
    factors, before, pending, sums = (), (), (), ()
    for back in tl.static_range(WIDTH):
        factor = tl.load(taps + (WIDTH - 1 - back) * row_width + channel, mask=inside, other=0.0)
        factors = factors + (factor.to(tl.float32),)
        sums = sums + (tl.zeros((COLUMNS,), tl.float32),)
    for back in tl.static_range(1, WIDTH):
        row = tl.load(x - back * x_stride + channel, mask=inside & (first >= back), other=0.0)
        before = before + (row.to(tl.float32),)
        pending = pending + (tl.zeros((COLUMNS,), tl.float32),)
    for start in range(0, TOKENS + WIDTH - 1, AHEAD):
        rows, upstreams, reached = (), (), ()
        for step in tl.static_range(AHEAD):
            token = start + step
            read = inside & (token < exist)
            rows = rows + (tl.load(x + token * x_stride + channel, mask=read, other=0.0).to(tl.float32),)
            upstream = tl.load(gradient + token * row_width + channel, mask=read, other=0.0)
            upstreams = upstreams + (upstream.to(tl.float32),)
            reached = reached + (tl.load(places + first + token, mask=token < exist, other=0),)
        for step in tl.static_range(AHEAD):
            token, place = start + step, reached[step]
            seen = (rows[step],)
            for back in tl.static_range(1, WIDTH):
                seen = seen + (tl.where(place >= back, before[back - 1], 0.0),)
            inner = _before_activation(upstreams[step], seen, factors, UNIT, WIDTH, COLUMNS)
            counted = tl.where(token < own, inner, 0.0)
            added, given, kept, shifted = (), (inner * factors[0],), (), ()
            for back in tl.static_range(WIDTH):
                added = added + (sums[back] + counted * seen[back],)
            for back in tl.static_range(1, WIDTH):
                given = given + (pending[back - 1] + tl.where(place >= back, inner, 0.0) * factors[back],)
                kept = kept + (given[back - 1],)
                shifted = shifted + (seen[back - 1],)
            sums, pending, before = added, kept, shifted
            complete = token - (WIDTH - 1)
            stored = inside & (complete >= 0) & (complete < own)
            at = target + complete * target_stride + channel
            tl.store(at, given[WIDTH - 1].to(target.dtype.element_ty), mask=stored)
    for back in tl.static_range(WIDTH):
        tl.store(parts + (WIDTH - 1 - back) * row_width + channel, sums[back], mask=inside)


@triton.jit
def _before_activation(
    upstream, seen, factors, UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """The gradient before norm and SiLU of one row, which saw the rows `seen`, weighted by `factors`."""
    total = tl.zeros((COLUMNS,), tl.float32)
    for back in tl.static_range(WIDTH):
        total += seen[back] * factors[back]
    gate = tl.sigmoid(total)
    y = total * gate
    if UNIT:
        inverse = tl.rsqrt(tl.sum(y * y, 0) + _EPSILON)
        direction = y * inverse
        upstream = (upstream - tl.sum(upstream * direction, 0) * direction) * inverse
    return upstream * (gate + y * (1.0 - gate))
