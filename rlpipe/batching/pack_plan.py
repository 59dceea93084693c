"""Which sequences go into which pack of which data-parallel rank. Works on lengths alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlpipe.batching.balance import by_falling_cost, spread_packs, trade_sequences
from rlpipe.batching.bins import Bins, best_fit_decreasing, deal, level_fit, split_to_count
from rlpipe.batching.limits import PackLimits
from rlpipe.flops import sequence_cost
from rlpipe.model.model_reader import describe_model

LEVEL_FILL_SHARE = 0.985
"""Fill above which even packs are hardly ever found, so that looking for them is a waste of time."""

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
) -> PackPlan:
    """Lay sequences into packs: as few as possible, as many on each rank, and as even in cost as can be.

    lengths_tokens: int64 [n], real lengths. No pack exceeds `limits.capacity_tokens`, padding included. Every index
    appears exactly once, in a pack or in `oversize`.
    """
    padded = limits.padded_tokens(lengths_tokens)
    fits = np.flatnonzero(padded <= limits.capacity_tokens)
    sequences = _Sequences(padded[fits], cost(lengths_tokens[fits]), limits.capacity_tokens)
    ranks = _fewest_packs(sequences, data_parallel, limits.count_multiple)
    names = fits.tolist()
    return PackPlan(
        tuple(tuple(tuple(sorted([names[item] for item in pack])) for pack in rank) for rank in ranks),
        tuple(np.flatnonzero(padded > limits.capacity_tokens).tolist()),
    )


@dataclass(frozen=True)
class _Sequences:
    """Padded sizes (int64 [n]) and costs (float64 [n]) of what is to be packed, and the capacity of a pack."""

    sizes: NDArray[np.int64]
    costs: NDArray[np.float64]
    capacity: int


def _fewest_packs(sequences: _Sequences, ranks: int, count_multiple: int) -> list[Bins]:
    """Try the count that the tokens alone ask for; where that fails, the count of best-fit decreasing."""

    def slots_for(packs: int) -> int:
        return max(1, -(-packs // (ranks * count_multiple))) * count_multiple

    least = slots_for(-(-int(sequences.sizes.sum()) // sequences.capacity))
    shares = deal(sequences.sizes, sequences.costs, ranks) if ranks > 1 else None
    if shares and (planned := _pack_shares(sequences, shares, least)):
        return planned
    tight = best_fit_decreasing(sequences.sizes, sequences.capacity)
    slots = slots_for(len(tight))
    if slots > least and shares and (planned := _pack_shares(sequences, shares, slots)):
        return planned
    packs = split_to_count(tight, sequences.costs, ranks * slots)
    planned = spread_packs(packs + [[] for _ in range(ranks * slots - len(packs))], sequences.costs, ranks)
    return trade_sequences(planned, sequences.sizes, sequences.costs, sequences.capacity)


def _pack_shares(sequences: _Sequences, shares: Sequence[NDArray[np.int64]], slots: int) -> list[Bins] | None:
    """Pack the share of each rank; None where one needs more than `slots` packs.

    Shares of even cost are the evenest plan, because single sequences were dealt, but they need some room.
    """
    planned = []
    for items in shares:
        sizes, costs = sequences.sizes[items], sequences.costs[items]
        if int(sizes.sum()) > slots * sequences.capacity:
            return None
        tight = int(sizes.sum()) > LEVEL_FILL_SHARE * slots * sequences.capacity
        packs = [list(range(len(items)))] if slots == 1 else None
        if packs is None and not tight:
            packs = level_fit(sizes, costs, sequences.capacity, slots)
        if packs is None:
            packs = best_fit_decreasing(sizes, sequences.capacity)
            if len(packs) > slots:
                return None
        packs = by_falling_cost(packs, costs) + [[] for _ in range(slots - len(packs))]
        share = items.tolist()
        planned.append([[share[item] for item in pack] for pack in packs])
    return planned


def flops_cost(model_path: str) -> CostModel:
    """Forward FLOPs of each sequence of an int64 [n] array of lengths, as float64 [n]."""
    return cost_per_length(sequence_cost(describe_model(model_path).shape, include_mtp=False))
