"""Which sequences go into which pack of which data-parallel rank. Works on lengths alone."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlpipe.batching.bins import Bins, best_fit_decreasing, level_fit, split_to_count
from rlpipe.batching.limits import PackLimits

CostModel = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""Cost of sequences, in any unit, from their real lengths in tokens: FLOPs, `a * length + b * length**2`."""


@dataclass(frozen=True)
class PackPlan:
    """`ranks[r][slot]` holds the indices of the sequences of one pack; an empty tuple is a dummy pack.

    All ranks have the same number of slots. Within a rank packs are ordered by falling cost, so that the packs that run
    at the same time on all ranks cost about the same (experts are exchanged between data-parallel ranks in each
    layer) and the largest pack comes first. `oversize` are sequences that no pack can hold.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    oversize: tuple[int, ...]

    @property
    def packs_per_rank(self) -> int:
        return len(self.ranks[0])


def proportional_cost(lengths_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """The cost model to use where no FLOPs are known: the number of tokens."""
    return lengths_tokens.astype(np.float64)


def cost_per_length(cost: Callable[[int], float]) -> CostModel:
    """A cost model from a function of one length, for instance a `rlpipe.flops.SequenceCost`."""

    def costs(lengths_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        lengths, inverse = np.unique(lengths_tokens, return_inverse=True)
        return np.array([float(cost(length)) for length in lengths.tolist()])[inverse]

    return costs


def plan_packs(
    lengths_tokens: NDArray[np.int64],
    limits: PackLimits,
    data_parallel: int = 1,
    cost: CostModel = proportional_cost,
    slots_multiple: int = 1,
) -> PackPlan:
    """Lay sequences into packs: as few as possible, as many on each rank, and as even in cost as can be.

    lengths_tokens: int64 [n], real lengths. slots_multiple: packs per rank are a multiple of it (interleaved pipeline
    schedules need one). No pack exceeds `limits.capacity_tokens`, padding included. Every index appears exactly once,
    in a pack or in `oversize`.
    """
    padded = limits.padded_tokens(lengths_tokens)
    fits = np.flatnonzero(padded <= limits.capacity_tokens)
    costs = cost(lengths_tokens[fits])
    bins = _bins(padded[fits], costs, limits.capacity_tokens, data_parallel * slots_multiple)
    bin_costs = np.array([float(costs[items].sum()) for items in bins])
    ranks = _deal(bin_costs, data_parallel)
    _even_out(ranks, bin_costs)
    names = fits.tolist()
    return PackPlan(
        tuple(tuple(tuple(sorted(names[item] for item in bins[slot])) for slot in rank) for rank in ranks),
        tuple(np.flatnonzero(padded > limits.capacity_tokens).tolist()),
    )


def _bins(padded: NDArray[np.int64], costs: NDArray[np.float64], capacity: int, multiple: int) -> Bins:
    """At least one bin per rank and a multiple of `multiple` of them; empty ones where sequences are too few."""
    tight = best_fit_decreasing(padded, capacity)
    count = max(1, -(-len(tight) // multiple)) * multiple
    if multiple == 1:
        return tight or [[]]
    bins = level_fit(padded, costs, capacity, count) or split_to_count(tight, costs, count)
    return bins + [[] for _ in range(count - len(bins))]


def _deal(bin_costs: NDArray[np.float64], ranks: int) -> list[list[int]]:
    """Bins to ranks, equal counts: slot by slot in order of cost, the costliest bin to the least loaded rank."""
    order = np.argsort(-bin_costs, kind="stable").reshape(-1, ranks)
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks)
    for slot in order:
        for rank, number in zip(np.argsort(load, kind="stable").tolist(), slot.tolist(), strict=True):
            dealt[rank].append(number)
            load[rank] += bin_costs[number]
    return dealt


def _even_out(ranks: list[list[int]], bin_costs: NDArray[np.float64], tolerance: float = 0.002) -> None:
    """Swap packs between the most and the least loaded rank while that lowers the larger load."""
    load = np.array([bin_costs[rank].sum() for rank in ranks])
    for _ in range(8 * len(ranks)):
        high, low = int(load.argmax()), int(load.argmin())
        gap = load[high] - load[low]
        if gap <= tolerance * load.mean():
            break
        gains = bin_costs[ranks[high]][:, None] - bin_costs[ranks[low]][None, :]
        after = np.abs(gains - gap / 2)
        give, take = divmod(int(after.argmin()), len(ranks[low]))
        gain = gains[give, take]
        if not 0 < gain < gap:
            break
        ranks[high][give], ranks[low][take] = ranks[low][take], ranks[high][give]
        load[high] -= gain
        load[low] += gain
    for rank in ranks:
        rank.sort(key=lambda number: (-bin_costs[number], number))
