"""Triton kernels between matrix products. Imported only on a GPU: who calls them has the same in plain torch. None has
a gradient of its own."""

import torch
import triton
import triton.language as tl


def spread_rows(tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """See `actor.layers.expert_rows`.

    Reading each token once is what a gather in the rows' order cannot do: an expert's tokens lie all over the pack.
    """
    tokens = tokens.contiguous()
    count, per_token = rows.shape
    out = tokens.new_empty(rows.numel(), tokens.shape[1])
    width = tokens.shape[1]
    if count:
        _spread_rows[(count,)](tokens, rows, out, WIDTH=width, PER_TOKEN=per_token, COLUMNS=_columns(width))
    return out


@triton.jit
def _spread_rows(tokens, rows, out, WIDTH: tl.constexpr, PER_TOKEN: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        channel = start + tl.arange(0, COLUMNS)
        values = tl.load(tokens + token * WIDTH + channel, mask=channel < WIDTH)
        for slot in tl.static_range(PER_TOKEN):
            row = tl.load(rows + token * PER_TOKEN + slot)
            tl.store(out + row * WIDTH + channel, values, mask=channel < WIDTH)


def spread_rows_beside(
    gradient: torch.Tensor, rows: torch.Tensor, shared: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `actor.layers.expert_rows`; all from one reading of the gradient."""
    count, width = gradient.shape
    out = gradient.new_empty(rows.numel(), width)
    of_shared, of_logits = torch.empty_like(shared), torch.empty_like(logits)
    if count:
        _spread_rows_beside[(count,)](
            gradient,
            rows,
            shared,
            logits,
            out,
            of_shared,
            of_logits,
            WIDTH=width,
            PER_TOKEN=rows.shape[1],
            COLUMNS=_columns(width),
        )
    return out, of_shared, of_logits


@triton.jit
def _spread_rows_beside(
    gradient, rows, shared, logits, out, of_shared, of_logits,
    WIDTH: tl.constexpr, PER_TOKEN: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    gate = tl.sigmoid(tl.load(logits + token).to(tl.float32))
    along = 0.0
    for start in tl.static_range(0, WIDTH, COLUMNS):
        channel = start + tl.arange(0, COLUMNS)
        kept = channel < WIDTH
        values = tl.load(gradient + token * WIDTH + channel, mask=kept, other=0.0)
        for slot in tl.static_range(PER_TOKEN):
            row = tl.load(rows + token * PER_TOKEN + slot)
            tl.store(out + row * WIDTH + channel, values, mask=kept)
        beside = tl.load(shared + token * WIDTH + channel, mask=kept, other=0.0).to(tl.float32)
        along += tl.sum(values.to(tl.float32) * beside, 0)
        inner = values.to(tl.float32) * gate
        tl.store(of_shared + token * WIDTH + channel, inner.to(of_shared.dtype.element_ty), mask=kept)
    tl.store(of_logits + token, (along * gate * (1.0 - gate)).to(of_logits.dtype.element_ty))


def sum_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """See `actor.layers.expert_rows`."""
    return _summed(rows, places, rows, rows, rows, "alone")


def sum_rows_beside(
    rows: torch.Tensor, places: torch.Tensor, shared: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """See `actor.layers.expert_rows`."""
    return _summed(rows, places, shared, logits, rows, "gated")


def sum_rows_and(
    rows: torch.Tensor, places: torch.Tensor, beside: torch.Tensor, logits: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """See `actor.layers.expert_rows`."""
    return _summed(rows, places, beside, logits, gate, "added")


def _summed(
    rows: torch.Tensor,
    places: torch.Tensor,
    beside: torch.Tensor,
    logits: torch.Tensor,
    gate: torch.Tensor,
    way: str,
) -> torch.Tensor:
    rows, beside, logits = rows.contiguous(), beside.contiguous(), logits.contiguous()
    (tokens, per_token), width = places.shape, rows.shape[1]
    out = rows.new_empty(tokens, width)
    if tokens:
        _sum_rows[(tokens,)](
            rows,
            places.contiguous(),
            beside,
            logits,
            gate,
            out,
            WIDTH=width,
            PER_TOKEN=per_token,
            COLUMNS=_columns(width),
            WAY=way,
        )
    return out


@triton.jit
def _sum_rows(
    rows, places, beside, logits, gate, out,
    WIDTH: tl.constexpr, PER_TOKEN: tl.constexpr, COLUMNS: tl.constexpr, WAY: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        channel = start + tl.arange(0, COLUMNS)
        kept = channel < WIDTH
        total = tl.zeros((COLUMNS,), tl.float32)
        for slot in tl.static_range(PER_TOKEN):
            row = tl.load(places + token * PER_TOKEN + slot)
            total += tl.load(rows + row * WIDTH + channel, mask=kept, other=0.0).to(tl.float32)
        if WAY != "alone":
            logit = tl.load(logits + token).to(tl.float32)
            values = tl.load(beside + token * WIDTH + channel, mask=kept, other=0.0).to(tl.float32)
            if WAY == "gated":
                total += values * tl.sigmoid(logit)
            else:
                total += values + logit * tl.load(gate + channel, mask=kept, other=0.0).to(tl.float32)
        tl.store(out + token * WIDTH + channel, total.to(out.dtype.element_ty), mask=kept)


def _columns(width: int) -> int:
    """Of a row that a program has in hand at a time."""
    return min(4096, triton.next_power_of_2(width))


_ROUTED_TOKENS = 16
_LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # finite


def choose(logits: torch.Tensor, per_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest `per_token` logits of each token, highest first, and their softmax.

    logits: float32 [t, experts]; returns (weights float32, choices int64), both [t, per_token]. NaN is the highest, as
    in torch.topk, and makes all weights of its token NaN.
    """
    tokens, experts = logits.shape
    logits = logits.contiguous()
    weights = logits.new_empty(tokens, per_token)
    chosen = torch.empty_like(weights, dtype=torch.int64)
    if tokens:
        _choose[(triton.cdiv(tokens, _ROUTED_TOKENS),)](
            logits,
            weights,
            chosen,
            tokens,
            experts,
            PER_TOKEN=per_token,
            SLOTS=triton.next_power_of_2(per_token),
            ROWS=_ROUTED_TOKENS,
            COLUMNS=triton.next_power_of_2(experts),
        )
    return weights, chosen


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    logits, weights, chosen, tokens, experts,
    PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert, slot = tl.arange(0, COLUMNS), tl.arange(0, SLOTS)
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    read = tl.load(logits + token[:, None] * experts + expert[None, :], mask=inside, other=float("-inf"))
    # Comparisons with NaN would end in a column that is no expert; what is taken or no expert ranks below all others.
    ranked = tl.where(read != read, float("inf"), tl.maximum(read, _LOWEST))
    left = tl.where(inside, ranked, float("-inf"))
    values = tl.full((ROWS, SLOTS), float("-inf"), tl.float32)
    indices = tl.zeros((ROWS, SLOTS), tl.int64)
    for found in tl.static_range(PER_TOKEN):
        highest, index = tl.max(left, 1, return_indices=True)
        values = tl.where(slot[None, :] == found, highest[:, None], values)
        indices = tl.where(slot[None, :] == found, index[:, None], indices)
        left = tl.where(expert[None, :] == index[:, None], float("-inf"), left)
    values = tl.where(values == _LOWEST, float("-inf"), values)
    powers = tl.exp(values - tl.max(values, 1)[:, None])
    at = token[:, None] * PER_TOKEN + slot[None, :]
    kept = (token < tokens)[:, None] & (slot < PER_TOKEN)[None, :]
    tl.store(weights + at, powers / tl.sum(powers, 1)[:, None], mask=kept)
    tl.store(chosen + at, indices, mask=kept)


def product_of(gate_up: torch.Tensor) -> torch.Tensor:
    """See `actor.layers.swiglu`."""
    return _product(gate_up, None)


def weighted_product_of(gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See `actor.layers.swiglu`."""
    return _product(gate_up, weights)


def _product(gate_up: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    count, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(count, width)
    if count:
        blocks = _swiglu_blocks(width)
        _swiglu[(triton.cdiv(count, blocks["ROWS"]), triton.cdiv(width, blocks["COLUMNS"]))](
            gate_up,
            out if weights is None else weights,
            out,
            count,
            WIDTH=width,
            WEIGHTED=weights is not None,
            **blocks,
        )
    return out


def _swiglu_blocks(width: int) -> dict[str, int]:
    columns = min(2048, triton.next_power_of_2(width))
    return {"COLUMNS": columns, "ROWS": max(1, 2048 // columns)}


@triton.jit(do_not_specialize=["count"])
def _swiglu(
    gate_up, weights, out, count,
    WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kept = (row < count)[:, None] & (column < WIDTH)[None, :]
    gates = row[:, None] * (2 * WIDTH) + column[None, :]
    gate = tl.load(gate_up + gates, mask=kept, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * tl.load(gate_up + gates + WIDTH, mask=kept, other=0.0).to(tl.float32)
    if WEIGHTED:
        product = product * tl.load(weights + row, mask=row < count, other=0.0)[:, None]
    tl.store(out + row[:, None] * WIDTH + column[None, :], product.to(out.dtype.element_ty), mask=kept)


def swiglu_gradient(
    gradient: torch.Tensor, gate_up: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of silu(gate) x up (x weight). gradient: [n, width]; gate_up: [n, 2 x width]; weights: float32 [n, 1].

    Returns the gradients of `gate_up` and of `weights` (of no meaning without them).
    """
    gradient, gate_up = gradient.contiguous(), gate_up.contiguous()
    count, width = gradient.shape
    inner = torch.empty_like(gate_up)
    outer = gradient.new_empty(count, 1, dtype=torch.float32)
    if count:
        blocks = _swiglu_blocks(width)
        _swiglu_gradient[(triton.cdiv(count, blocks["ROWS"]),)](
            gradient,
            gate_up,
            outer if weights is None else weights,
            inner,
            outer,
            count,
            WIDTH=width,
            WEIGHTED=weights is not None,
            **blocks,
        )
    return inner, outer


@triton.jit(do_not_specialize=["count"])
def _swiglu_gradient(
    gradient, gate_up, weights, inner, outer, count,
    WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < count
    along = tl.zeros((ROWS,), tl.float32)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        kept = exists[:, None] & (column < WIDTH)[None, :]
        gates = row[:, None] * (2 * WIDTH) + column[None, :]
        upstream = tl.load(gradient + row[:, None] * WIDTH + column[None, :], mask=kept, other=0.0).to(tl.float32)
        gate = tl.load(gate_up + gates, mask=kept, other=0.0).to(tl.float32)
        up = tl.load(gate_up + gates + WIDTH, mask=kept, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        activated = gate * share
        if WEIGHTED:
            along += tl.sum(upstream * activated * up, 1)
            upstream = upstream * tl.load(weights + row, mask=exists, other=0.0)[:, None]
        slope = share + activated * (1.0 - share)
        tl.store(inner + gates, (upstream * up * slope).to(inner.dtype.element_ty), mask=kept)
        tl.store(inner + gates + WIDTH, (upstream * activated).to(inner.dtype.element_ty), mask=kept)
    if WEIGHTED:
        tl.store(outer + row, along, mask=exists)
