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
            _convolve[triton.cdiv(len(x), _STRETCH_STEPS), out.shape[1]](
                x,
                x.stride(0),
                weight.t().contiguous(),
                places,
                out,
                len(x),
                x.shape[1],
                TOKENS=_STRETCH_STEPS,
                AHEAD=_ROWS_AHEAD,
                **_shape(weight, channels, unit=index < 2),
                num_warps=1,
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


@triton.jit(do_not_specialize=_ANY_LENGTH)
def _convolve(
    x, x_stride, taps, places, out, tokens, row_width,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, TOKENS: tl.constexpr, AHEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """A stretch of TOKENS, token after token: the rows that a token sees are still in registers. AHEAD rows are read at
    a time, before the writes that reading must not pass."""
    first = tl.program_id(0).to(tl.int64) * TOKENS
    exist = tl.minimum(tokens - first, TOKENS).to(tl.int32)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, COLUMNS)
    inside = tl.full((COLUMNS,), 1, tl.int1) if COLUMNS == CHANNELS else tl.arange(0, COLUMNS) < CHANNELS
    x += first * x_stride
    out += first * row_width
    factors, before = _factors_and_rows_before(x, x_stride, taps, row_width, channel, inside, first, WIDTH)
    for start in range(0, TOKENS, AHEAD):
        rows, reached = (), ()
        for step in tl.static_range(AHEAD):
            token = start + step
            row = tl.load(x + token * x_stride + channel, mask=inside & (token < exist), other=0.0)
            rows = rows + (row.to(tl.float32),)
            reached = reached + (tl.load(places + first + token, mask=token < exist, other=0),)
        for step in tl.static_range(AHEAD):
            seen = _seen(rows[step], before, reached[step], WIDTH)
            total = _weighted(seen, factors, WIDTH, COLUMNS)
            y = total * tl.sigmoid(total)
            if UNIT:
                y = y * tl.rsqrt(tl.sum(y * y, 0) + _EPSILON)
            token = start + step
            at = out + token * row_width + channel
            tl.store(at, y.to(out.dtype.element_ty), mask=inside & (token < exist))
            before = _without_last(seen, WIDTH)


@triton.jit
def _factors_and_rows_before(x, x_stride, taps, row_width, channel, inside, first, WIDTH: tl.constexpr) -> tl.tuple:
    """The weights of a token's own row and of those back from it, and the rows before the first one, the next first."""
    factors, before = (), ()
    for back in tl.static_range(WIDTH):
        factor = tl.load(taps + (WIDTH - 1 - back) * row_width + channel, mask=inside, other=0.0)
        factors = factors + (factor.to(tl.float32),)
    for back in tl.static_range(1, WIDTH):
        row = tl.load(x - back * x_stride + channel, mask=inside & (first >= back), other=0.0)
        before = before + (row.to(tl.float32),)
    return factors, before


@triton.jit
def _seen(row, before, place, WIDTH: tl.constexpr) -> tl.tuple:
    """A token's own row and those before it, which are zero where another sequence's tokens stand."""
    seen = (row,)
    for back in tl.static_range(1, WIDTH):
        seen = seen + (tl.where(place >= back, before[back - 1], 0.0),)
    return seen


@triton.jit
def _weighted(seen, factors, WIDTH: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    total = tl.zeros((COLUMNS,), tl.float32)
    for back in tl.static_range(WIDTH):
        total += seen[back] * factors[back]
    return total


@triton.jit
def _without_last(rows, WIDTH: tl.constexpr) -> tl.tuple:
    kept = ()
    for back in tl.static_range(WIDTH - 1):
        kept = kept + (rows[back],)
    return kept


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
    factors, before = _factors_and_rows_before(x, x_stride, taps, row_width, channel, inside, first, WIDTH)
    sums = ()
    for _ in tl.static_range(WIDTH):
        sums = sums + (tl.zeros((COLUMNS,), tl.float32),)
    pending = _without_last(sums, WIDTH)
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
            seen = _seen(rows[step], before, place, WIDTH)
            inner = _before_activation(upstreams[step], seen, factors, UNIT, WIDTH, COLUMNS)
            counted = tl.where(token < own, inner, 0.0)
            added, given = (), (inner * factors[0],)
            for back in tl.static_range(WIDTH):
                added = added + (sums[back] + counted * seen[back],)
            for back in tl.static_range(1, WIDTH):
                given = given + (pending[back - 1] + tl.where(place >= back, inner, 0.0) * factors[back],)
            sums, pending, before = added, _without_last(given, WIDTH), _without_last(seen, WIDTH)
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
    total = _weighted(seen, factors, WIDTH, COLUMNS)
    gate = tl.sigmoid(total)
    y = total * gate
    if UNIT:
        inverse = tl.rsqrt(tl.sum(y * y, 0) + _EPSILON)
        direction = y * inverse
        upstream = (upstream - tl.sum(upstream * direction, 0) * direction) * inverse
    return upstream * (gate + y * (1.0 - gate))
