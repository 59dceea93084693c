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
_STRETCH_ROWS, _STRETCH_TILES, _STRETCH_WARPS = 8, 32, 4
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
                **_constants(weight, channels, unit=index < 2),
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
    inner, taps = torch.empty_like(gradient), weight.t().contiguous()
    constants = _constants(weight, channels, unit)
    _before_activation[triton.cdiv(tokens, _ROWS), heads](
        x, x.stride(0), taps, places, gradient, inner, tokens, heads * channels, **constants
    )
    constants = {**constants, "ROWS": _STRETCH_ROWS, "TILES": _STRETCH_TILES, "num_warps": _STRETCH_WARPS}
    del constants["UNIT"]
    stretches = triton.cdiv(tokens, _STRETCH_ROWS * _STRETCH_TILES)
    parts = gradient.new_empty(stretches, weight.shape[1], len(weight), dtype=torch.float32)
    _before_convolution[stretches, heads](
        inner, x, x.stride(0), taps, places, target, target.stride(0), parts, tokens, heads * channels, **constants
    )
    return parts.sum(0).t().to(weight.dtype)


def _constants(weight: torch.Tensor, channels: int, unit: bool) -> dict[str, Any]:
    return {
        "CHANNELS": channels,
        "WIDTH": weight.shape[1],
        "UNIT": unit,
        "ROWS": _ROWS,
        "COLUMNS": triton.next_power_of_2(channels),
        "num_warps": _WARPS,
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
def _before_activation(
    x, x_stride, taps, places, gradient, inner, tokens, row_width,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """The gradient before norm and SiLU."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = tl.arange(0, COLUMNS) < CHANNELS
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, COLUMNS)
    place = tl.load(places + token, mask=token < tokens, other=-1)
    kept = (token < tokens)[:, None] & inside[None, :]
    at = token[:, None] * row_width + channel[None, :]
    upstream = tl.load(gradient + at, mask=kept, other=0.0).to(tl.float32)
    total = _convolution(x, x_stride, taps, token, place, channel, inside, row_width, WIDTH, ROWS, COLUMNS)
    gate = tl.sigmoid(total)
    y = total * gate
    if UNIT:
        inverse = tl.rsqrt(tl.sum(y * y, 1) + _EPSILON)[:, None]
        direction = y * inverse
        upstream = (upstream - tl.sum(upstream * direction, 1)[:, None] * direction) * inverse
    upstream = upstream * (gate + y * (1.0 - gate))
    tl.store(inner + at, upstream.to(inner.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=_ANY_LENGTH)
def _before_convolution(
    inner, x, x_stride, taps, places, target, target_stride, parts, tokens, row_width,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """The gradient of the convolution's input, and a stretch's part of the weight's: float32 [stretches, WIDTH, c].

    Every token gave to itself and the next WIDTH - 1 of its sequence. Sums over tokens stay in registers for a whole
    stretch: reducing each tile across warps took five times as long as everything else.
    """
    inside = tl.arange(0, COLUMNS) < CHANNELS
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, COLUMNS)
    sums = ()
    for _ in tl.static_range(WIDTH):
        sums = sums + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    for tile in range(TILES):
        token = (tl.program_id(0).to(tl.int64) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        kept = (token < tokens)[:, None] & inside[None, :]
        given = tl.load(x + token[:, None] * x_stride + channel[None, :], mask=kept, other=0.0).to(tl.float32)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        added = ()
        for ahead in tl.static_range(WIDTH):
            place = tl.load(places + token + ahead, mask=token + ahead < tokens, other=-1)
            reached = (place >= ahead)[:, None] & inside[None, :]
            row = tl.load(inner + (token + ahead)[:, None] * row_width + channel[None, :], mask=reached, other=0.0)
            factor = tl.load(taps + (WIDTH - 1 - ahead) * row_width + channel, mask=inside, other=0.0)
            total += row.to(tl.float32) * factor.to(tl.float32)[None, :]
            added = added + (sums[ahead] + row.to(tl.float32) * given,)
        sums = added
        place_in_target = target + token[:, None] * target_stride + channel[None, :]
        tl.store(place_in_target, total.to(target.dtype.element_ty), mask=kept)
    for ahead in tl.static_range(WIDTH):
        part = parts + (tl.program_id(0).to(tl.int64) * WIDTH + WIDTH - 1 - ahead) * row_width + channel
        tl.store(part, tl.sum(sums[ahead], 0), mask=inside)
