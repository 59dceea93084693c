"""Triton kernels that draw a token of each row of logits and tell its log-probability, reading each logit once.
Imported only on a GPU: see `rollout.sglang_patches.plain_draw`."""

import torch
import triton
import triton.language as tl

_QUARTER = 1024  # columns of a program for which four random numbers are made at a time
_LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # finite
_PARTS: tl.constexpr = tl.constexpr(4)  # that a program tells of its columns


def draw_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, int32 [rows], and their natural log-probabilities at that temperature, float32 [rows].

    By the Gumbel-max trick (Maddison et al. 2014, arXiv:1411.0030) with noise of Philox. The log-probability is not
    a number where a logit of the row is none or is positive and infinite. A logit of -inf is never drawn beside others.

    logits: [rows, vocabulary], whose rows need not follow one another; temperatures: float32 [rows]; seeds: int64
    [rows], whose equality makes equal noise.
    """
    rows, columns = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    splits = triton.cdiv(columns, 4 * _QUARTER)
    parts = torch.empty(rows, splits, _PARTS.value, dtype=torch.float32, device=logits.device)
    leaders = torch.empty(rows, splits, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _lead_of_columns[(rows, splits)](
            logits, logits.stride(0), temperatures, seeds, parts, leaders, WIDTH=columns, QUARTER=_QUARTER
        )
        _lead_of_row[(rows,)](
            parts, leaders, tokens, logprobs, SPLITS=splits, BLOCK=triton.next_power_of_2(splits), num_warps=1
        )
    return tokens, logprobs


@triton.jit(do_not_specialize_on_alignment=["temperatures", "seeds"])
def _lead_of_columns(
    logits, row_stride, temperatures, seeds, parts, leaders, WIDTH: tl.constexpr, QUARTER: tl.constexpr
) -> None:
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    colder = 1.0 / tl.load(temperatures + row)
    lane = tl.arange(0, QUARTER)
    first, second, third, fourth = tl.randint4x(tl.load(seeds + row), split * QUARTER + lane)
    here = logits + row * row_stride
    start = split * 4 * QUARTER
    x0 = _colder(here, start + lane, colder, WIDTH)
    x1 = _colder(here, start + QUARTER + lane, colder, WIDTH)
    x2 = _colder(here, start + 2 * QUARTER + lane, colder, WIDTH)
    x3 = _colder(here, start + 3 * QUARTER + lane, colder, WIDTH)
    largest = tl.maximum(tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 0), _LOWEST)
    powers = tl.exp(x0 - largest) + tl.exp(x1 - largest) + tl.exp(x2 - largest) + tl.exp(x3 - largest)
    best, value, column = x0 + _gumbel(first), x0, start + lane
    best, value, column = _ahead(best, value, column, x1 + _gumbel(second), x1, start + QUARTER + lane)
    best, value, column = _ahead(best, value, column, x2 + _gumbel(third), x2, start + 2 * QUARTER + lane)
    best, value, column = _ahead(best, value, column, x3 + _gumbel(fourth), x3, start + 3 * QUARTER + lane)
    top, place = tl.max(best, 0, return_indices=True)
    leads = lane == place
    own = row * tl.num_programs(1) + split
    tl.store(leaders + own, tl.sum(tl.where(leads, column, 0), 0))
    own = parts + own * _PARTS
    tl.store(own, largest)
    tl.store(own + 1, tl.sum(powers, 0))
    tl.store(own + 2, top)
    tl.store(own + 3, tl.sum(tl.where(leads, value, 0.0), 0))


@triton.jit
def _colder(row, column, colder, WIDTH: tl.constexpr) -> tl.tensor:
    """Logits at a temperature; beyond the vocabulary they are such that none is drawn."""
    return tl.load(row + column, mask=column < WIDTH, other=-float("inf")).to(tl.float32) * colder


@triton.jit
def _gumbel(random) -> tl.tensor:
    """Finite noise from 32 random bits. Its largest values, which decide, come from the smallest exponentials, whose
    logarithm's argument would round to one."""
    share = (random.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = share * (1.0 + share * (0.5 + share * (1.0 / 3.0 + share * 0.25)))
    exponential = tl.where(share < 0.01, series, -tl.log(tl.maximum(1.0 - share, 1.0e-10)))
    return -tl.log(exponential)


@triton.jit
def _ahead(best, value, column, other_best, other_value, other_column) -> tl.tuple:
    """Of two places each, the one with more; the first where they are equal."""
    other = other_best > best
    return tl.where(other, other_best, best), tl.where(other, other_value, value), tl.where(other, other_column, column)


@triton.jit
def _lead_of_row(parts, leaders, tokens, logprobs, SPLITS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row, split = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = split < SPLITS
    own = parts + (row * SPLITS + split) * _PARTS
    largest = tl.load(own, mask=there, other=_LOWEST)
    sums = tl.load(own + 1, mask=there, other=0.0)
    best = tl.load(own + 2, mask=there, other=-float("inf"))
    top, place = tl.max(best, 0, return_indices=True)
    leads = split == place
    row_largest = tl.max(largest, 0)
    normalizer = row_largest + tl.log(tl.sum(sums * tl.exp(largest - row_largest), 0))
    value = tl.sum(tl.where(leads, tl.load(own + 3, mask=there, other=0.0), 0.0), 0)
    tl.store(tokens + row, tl.sum(tl.where(leads, tl.load(leaders + row * SPLITS + split, mask=there, other=0), 0), 0))
    tl.store(logprobs + row, tl.minimum(value - normalizer, 0.0, propagate_nan=tl.PropagateNan.ALL))
