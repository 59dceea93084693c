"""Triton kernels over the logits of a chunk of tokens, which are read once and never copied. Imported only on a GPU:
see `actor.layers.logits`. None has a gradient of its own."""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from actor.layers.logits import SoftmaxParts

if TYPE_CHECKING:
    from actor.layers.logits import Chosen

_COLUMNS = 4096  # that a program has in hand at a time
_LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # finite


# Values of rows begin anywhere in memory, as the number of rows has it, which is no reason to compile again.
_OF_ROWS = ["column_of", "here", "temperatures", "normalizer", "of_logprob", "entropy", "of_entropy"]


def softmax_parts(
    logits: torch.Tensor, chosen: "Chosen", temperatures: torch.Tensor | None, with_weighted: bool
) -> SoftmaxParts:
    """See `actor.layers.logits`; what is weighted comes with the rest."""
    count, columns = logits.shape
    parts = torch.empty(count, len(SoftmaxParts._fields), dtype=torch.float32, device=logits.device)
    if count:
        _softmax_parts[(count,)](
            logits.contiguous(), *chosen, _or_ones(temperatures, chosen), parts, WIDTH=columns, **_blocks(columns)
        )
    return SoftmaxParts(*parts.unbind(1))


@triton.jit(do_not_specialize_on_alignment=_OF_ROWS[:3])
def _softmax_parts(logits, column_of, here, temperatures, parts, WIDTH: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    colder = 1.0 / tl.load(temperatures + row)
    # Each lane keeps its own largest value and sums below it, so that lanes meet once, after the last column.
    top = tl.full((COLUMNS,), _LOWEST, tl.float32)
    sums, products = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        x = tl.load(logits + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32) * colder
        higher = tl.where(inside, tl.maximum(top, x), top)
        risen = top - higher
        kept = tl.exp(risen)
        below = tl.where(inside, x - higher, 0.0)
        power = tl.where(inside, tl.exp(below), 0.0)
        products = kept * (products + risen * sums) + power * below
        sums = kept * sums + power
        top = higher
    largest = tl.max(top, 0)
    risen = top - largest
    kept = tl.exp(risen)
    target = tl.load(logits + row * WIDTH + tl.load(column_of + row)).to(tl.float32) * colder
    own = parts + row * 4
    tl.store(own, largest)
    tl.store(own + 1, tl.sum(kept * sums, 0))
    tl.store(own + 2, tl.sum(kept * (products + risen * sums), 0))
    tl.store(own + 3, target * tl.load(here + row))


def logit_gradient(
    logits: torch.Tensor,
    normalizer: torch.Tensor,
    chosen: "Chosen",
    of_logprob: torch.Tensor,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None,
    temperatures: torch.Tensor | None,
) -> torch.Tensor:
    """See `actor.layers.logits`; it takes the place of the logits."""
    logits = logits.contiguous()
    count, columns = logits.shape
    entropy, entropy_gradient = (normalizer, normalizer) if of_entropy is None else of_entropy
    if count:
        blocks = _blocks(columns)
        _logit_gradient[(count, triton.cdiv(columns, blocks["COLUMNS"]))](
            logits,
            normalizer.contiguous(),
            *chosen,
            of_logprob.contiguous(),
            entropy.contiguous(),
            entropy_gradient.contiguous(),
            _or_ones(temperatures, chosen),
            WIDTH=columns,
            ENTROPY=of_entropy is not None,
            **blocks,
        )
    return logits


@triton.jit(do_not_specialize_on_alignment=_OF_ROWS)
def _logit_gradient(
    logits, normalizer, column_of, here, of_logprob, entropy, of_entropy, temperatures,
    ENTROPY: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    at = logits + row * WIDTH + column
    colder = 1.0 / tl.load(temperatures + row)
    log_p = tl.load(at, mask=inside, other=0.0).to(tl.float32) * colder - tl.load(normalizer + row)
    p = tl.exp(log_p)
    target = tl.where(column == tl.load(column_of + row), tl.load(here + row), 0.0)
    gradient = (target - p) * tl.load(of_logprob + row)
    if ENTROPY:
        gradient -= p * (log_p + tl.load(entropy + row)) * tl.load(of_entropy + row)
    tl.store(at, (gradient * colder).to(logits.dtype.element_ty), mask=inside)


def _or_ones(temperatures: torch.Tensor | None, chosen: "Chosen") -> torch.Tensor:
    return torch.ones_like(chosen.here) if temperatures is None else temperatures.contiguous()


def _blocks(columns: int) -> dict[str, Any]:
    return {"COLUMNS": min(_COLUMNS, triton.next_power_of_2(columns)), "num_warps": 8}
