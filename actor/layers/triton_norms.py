"""Norms over rows and the gates of Gated DeltaNet as Triton kernels, with their gradients. Imported only on a GPU: who
calls them has the same in plain torch.

`torch.compile` makes kernels that are as fast, but the host takes three tenths of a millisecond to start one of them,
in each direction, and layers in small packs wait for the host.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096  # of a block of rows
# They share all rows, so that a weight's gradient has as many parts: four on each multiprocessor of a Hopper.
_PROGRAMS = 528


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See `actor.layers.norm`."""
    normed: torch.Tensor = RmsNorm.apply(x, None, weight, epsilon, 0.0)
    return normed


def zero_centered_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See `actor.layers.norm`."""
    normed: torch.Tensor = RmsNorm.apply(x, None, weight, epsilon, 1.0)
    return normed


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See `actor.layers.gated_delta_net`."""
    normed: torch.Tensor = RmsNorm.apply(x, gate, weight, epsilon, 0.0)
    return normed


class RmsNorm(torch.autograd.Function):
    """x [..., width] / rms(x) x (weight + center), times silu(gate) where there is a gate, shaped as x; a token's gates
    may lie among other channels."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, epsilon: float, center: float
    ) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, gate, weight)
        ctx.constants = epsilon, center
        out = torch.empty_like(x)
        rows = x.numel() // x.shape[-1]
        if rows:
            blocks = _blocks(x.shape[-1])
            _normalize[(triton.cdiv(rows, blocks["ROWS"]),)](
                x, *_gate(x, gate), weight, out, rows, epsilon, center, WIDTH=x.shape[-1], **blocks
            )
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_x = torch.empty_like(x)
        of_gate = None if gate is None else torch.empty_like(x)
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        blocks = _blocks(width)
        programs = min(_PROGRAMS, triton.cdiv(rows, blocks["ROWS"]))
        parts = x.new_empty(programs, width, dtype=torch.float32)
        if rows:
            _normalize_gradient[(programs,)](
                gradient,
                x,
                *_gate(x, gate),
                weight,
                of_x,
                x if of_gate is None else of_gate,
                parts,
                rows,
                *ctx.constants,
                WIDTH=width,
                **blocks,
            )
        of_weight = parts.sum(0, dtype=torch.float32).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return of_x, of_gate, of_weight, None, None


def _gate(x: torch.Tensor, gate: torch.Tensor | None) -> tuple[Any, ...]:
    """(gate, its elements from a token to the next, heads of a token, whether there is one)."""
    if gate is None:
        return x, 0, 1, False
    assert gate.stride()[1:] == (gate.shape[-1], 1), "heads of a token lie one after another"
    return gate, gate.stride(0), gate.shape[1], True


def _blocks(width: int) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    return {"COLUMNS": columns, "ROWS": max(1, _ELEMENTS // columns), "num_warps": 8}


@triton.jit(do_not_specialize=["rows", "gate_stride", "epsilon", "center"])
def _normalize(
    x, gate, gate_stride, heads: tl.constexpr, GATED: tl.constexpr, weight, out, rows, epsilon, center,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + center
    inverse = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + epsilon)
    normed = values * inverse[:, None] * scale[None, :]
    if GATED:
        gates = (row // heads)[:, None] * gate_stride + (row % heads)[:, None] * WIDTH + column[None, :]
        opening = tl.load(gate + gates, mask=inside, other=0.0).to(tl.float32)
        normed = normed * opening * tl.sigmoid(opening)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "gate_stride", "epsilon", "center"])
def _normalize_gradient(
    gradient, x, gate, gate_stride, heads: tl.constexpr, GATED: tl.constexpr, weight, of_x, of_gate, parts, rows,
    epsilon, center, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    column = tl.arange(0, COLUMNS)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + center
    total = tl.zeros((COLUMNS,), tl.float32)
    start = tl.program_id(0) * ROWS
    while start < rows:
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        at = row[:, None] * WIDTH + column[None, :]
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + epsilon)
        direction = values * inverse[:, None]
        if GATED:
            gates = (row // heads)[:, None] * gate_stride + (row % heads)[:, None] * WIDTH + column[None, :]
            opening = tl.load(gate + gates, mask=inside, other=0.0).to(tl.float32)
            share = tl.sigmoid(opening)
            slope = share * (1.0 + opening * (1.0 - share))
            opened = upstream * direction * scale[None, :] * slope
            tl.store(of_gate + at, opened.to(of_gate.dtype.element_ty), mask=inside)
            upstream = upstream * opening * share
        total += tl.sum(upstream * direction, 0)
        inner = upstream * scale[None, :]
        along = tl.sum(inner * direction, 1) / WIDTH
        result = (inner - direction * along[:, None]) * inverse[:, None]
        tl.store(of_x + at, result.to(of_x.dtype.element_ty), mask=inside)
        start += tl.num_programs(0) * ROWS
    tl.store(parts + tl.program_id(0).to(tl.int64) * WIDTH + column, total, mask=column < WIDTH)


def gates(
    alpha: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `actor.layers.gated_delta_net`."""
    both: tuple[torch.Tensor, torch.Tensor] = Gates.apply(alpha, beta, a_log, bias)
    return both


class Gates(torch.autograd.Function):
    """(-exp(a_log) x softplus(alpha + bias), sigmoid(beta)), both float32 [t, heads]; alpha and beta may be columns of
    something wider."""

    @staticmethod
    def forward(
        ctx: Any, alpha: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(alpha, beta, a_log, bias)
        tokens, heads = alpha.shape
        decay = torch.empty(tokens, heads, dtype=torch.float32, device=alpha.device)
        opened = torch.empty_like(decay)
        if tokens:
            blocks = _gate_blocks(heads)
            _gates[(triton.cdiv(tokens, blocks["ROWS"]),)](
                alpha, alpha.stride(0), beta, beta.stride(0), a_log, bias, decay, opened, tokens, HEADS=heads, **blocks
            )
        return decay, opened

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        alpha, beta, a_log, bias = ctx.saved_tensors
        of_decay, of_opened = (one.contiguous() for one in gradients)
        tokens, heads = alpha.shape
        blocks = _gate_blocks(heads)
        programs = min(_PROGRAMS, triton.cdiv(tokens, blocks["ROWS"]))
        of_alpha, of_beta = alpha.new_empty(tokens, heads), beta.new_empty(tokens, heads)
        parts = of_decay.new_empty(programs, 2, heads)
        if tokens:
            _gates_gradient[(programs,)](
                of_decay,
                of_opened,
                alpha,
                alpha.stride(0),
                beta,
                beta.stride(0),
                a_log,
                bias,
                of_alpha,
                of_beta,
                parts,
                tokens,
                HEADS=heads,
                **blocks,
            )
        of_a_log, of_bias = parts.sum(0).to(a_log.dtype)
        return of_alpha, of_beta, of_a_log, of_bias


def _gate_blocks(heads: int) -> dict[str, int]:
    columns = triton.next_power_of_2(heads)
    return {"COLUMNS": columns, "ROWS": max(1, 1024 // columns)}


@triton.jit
def _softplus(x) -> tl.tensor:
    """log(1 + exp(x)), where exp(-|x|) may vanish beside 1."""
    small = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(small < 1e-3, small * (1.0 - 0.5 * small), tl.log(1.0 + small))


_GATE_LENGTHS = ["tokens", "alpha_stride", "beta_stride"]


@triton.jit(do_not_specialize=_GATE_LENGTHS)
def _gates(
    alpha, alpha_stride, beta, beta_stride, a_log, bias, decay, opened, tokens,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (head < HEADS)[None, :]
    rate = tl.exp(tl.load(a_log + head, mask=head < HEADS, other=0.0).to(tl.float32))
    shift = tl.load(bias + head, mask=head < HEADS, other=0.0).to(tl.float32)
    raised = tl.load(alpha + token[:, None] * alpha_stride + head[None, :], mask=inside, other=0.0).to(tl.float32)
    raised += shift[None, :]
    at = token[:, None] * HEADS + head[None, :]
    tl.store(decay + at, -rate[None, :] * _softplus(raised), mask=inside)
    logit = tl.load(beta + token[:, None] * beta_stride + head[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(opened + at, tl.sigmoid(logit), mask=inside)


@triton.jit(do_not_specialize=_GATE_LENGTHS)
def _gates_gradient(
    of_decay, of_opened, alpha, alpha_stride, beta, beta_stride, a_log, bias, of_alpha, of_beta, parts, tokens,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.arange(0, COLUMNS)
    rate = tl.exp(tl.load(a_log + head, mask=head < HEADS, other=0.0).to(tl.float32))
    shift = tl.load(bias + head, mask=head < HEADS, other=0.0).to(tl.float32)
    of_rate, of_shift = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    start = tl.program_id(0) * ROWS
    while start < tokens:
        token = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (token < tokens)[:, None] & (head < HEADS)[None, :]
        at = token[:, None] * HEADS + head[None, :]
        raised = tl.load(alpha + token[:, None] * alpha_stride + head[None, :], mask=inside, other=0.0).to(tl.float32)
        raised += shift[None, :]
        upstream = -rate[None, :] * tl.load(of_decay + at, mask=inside, other=0.0)
        of_rate += tl.sum(upstream * _softplus(raised), 0)
        inner = upstream * tl.sigmoid(raised)
        of_shift += tl.sum(inner, 0)
        tl.store(of_alpha + at, inner.to(of_alpha.dtype.element_ty), mask=inside)
        logit = tl.load(beta + token[:, None] * beta_stride + head[None, :], mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(logit)
        opening = tl.load(of_opened + at, mask=inside, other=0.0) * share * (1.0 - share)
        tl.store(of_beta + at, opening.to(of_beta.dtype.element_ty), mask=inside)
        start += tl.num_programs(0) * ROWS
    own = parts + tl.program_id(0).to(tl.int64) * 2 * HEADS + head
    tl.store(own, of_rate, mask=head < HEADS)
    tl.store(own + HEADS, of_shift, mask=head < HEADS)
