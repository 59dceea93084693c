"""The packs of one iteration: for the update, for passes without gradients, and for supervised training."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rlpipe.batching.aggregation import Aggregation, sequence_weights
from rlpipe.batching.build_pack import build_pack
from rlpipe.batching.compact_pack import RankPacks, SamplePacker
from rlpipe.batching.limits import PackLimits
from rlpipe.batching.pack_plan import CostModel, PackPlan, plan_packs, proportional_cost
from rlpipe.batching.pack_report import PackReport, report_on
from rlpipe.batching.sequences import TrainingSequence
from rlpipe.shared.errors import DataError
from rlpipe.shared.pack import Pack, PackFrame, dummy_pack
from rlpipe.shared.sample import Sample
from rlpipe.shared.sample_table import SampleTable, numbered


@dataclass(frozen=True)
class TrainingPacks:
    """`ranks[data_rank][step]` is the list of packs of one optimizer step; equal shapes on all ranks.

    step_lengths_tokens: real lengths (int64 [n]) of each step's sequences, what `advise_budget` asks for.
    """

    ranks: list[list[list[PackFrame]]]
    report: PackReport
    step_lengths_tokens: tuple[NDArray[np.int64], ...]


@dataclass(frozen=True)
class ForwardPacks:
    """`ranks[data_rank]` is a list of packs; equal counts on all ranks."""

    ranks: list[list[PackFrame]]
    report: PackReport


def pack_for_training(
    samples: Sequence[Sample],
    limits: PackLimits,
    *,
    data_parallel: int,
    aggregation: Aggregation,
    norm_tokens: int,
    updates: int = 1,
    cost: CostModel = proportional_cost,
) -> TrainingPacks:
    """Packs of an iteration's update. Each sample is in exactly one pack, or in `report.oversize_ids`.

    Groups stay whole and in order: they are dealt to `updates` optimizer steps of equal size (within one group); with
    fewer groups than `updates` there are as many steps as groups. norm_tokens: the constant of `sequence_sum_norm`.
    Raises DataError for no samples, for a sample id that occurs twice and for a sample without an advantage.
    """
    table = SampleTable.of(samples)
    for index, advantage in enumerate(table.advantages):
        if advantage is None:
            raise DataError(f"sample {table[index].sample_id} has no advantage: compute advantages before packing")
    return _packed(
        *_of_samples(table, limits),
        limits,
        data_parallel=data_parallel,
        aggregation=aggregation,
        norm_tokens=norm_tokens,
        updates=updates,
        cost=cost,
    )


def pack_sequences(
    sequences: Sequence[TrainingSequence],
    limits: PackLimits,
    *,
    data_parallel: int,
    aggregation: Aggregation = "token_mean",
    norm_tokens: int = 1,
    updates: int = 1,
    cost: CostModel = proportional_cost,
) -> TrainingPacks:
    """`pack_for_training` for sequences from anywhere, for instance `supervised_sequence`."""
    batch = _Batch(
        [sequence.sequence_id for sequence in sequences],
        numbered(sequence.group_id for sequence in sequences),
        lambda: numbered(sequence.episode for sequence in sequences),
        np.array([sequence.tokens for sequence in sequences], np.int64),
        np.array([sequence.trained_tokens for sequence in sequences], np.int64),
    )

    def lay(indices: _Numbers, weights: NDArray[np.float64], counts: _Numbers) -> Iterator[Pack]:
        begin = 0
        for end in np.cumsum(counts).tolist():
            chosen = [sequences[index] for index in indices[begin:end].tolist()]
            yield build_pack(chosen, weights[begin:end].tolist(), limits)
            begin = end

    return _packed(
        batch,
        lay,
        limits,
        data_parallel=data_parallel,
        aggregation=aggregation,
        norm_tokens=norm_tokens,
        updates=updates,
        cost=cost,
    )


def pack_for_logprobs(
    samples: Sequence[Sample],
    limits: PackLimits,
    *,
    data_parallel: int,
    cost: CostModel = proportional_cost,
) -> ForwardPacks:
    """Packs of a pass without gradients, usually under a larger budget; advantages are not needed.

    The one step keeps all samples together. Scatter the results with `logprobs_by_sample`.
    """
    packed = _packed(*_of_samples(samples, limits), limits, data_parallel=data_parallel, cost=cost)
    return ForwardPacks([rank[0] for rank in packed.ranks], packed.report)


_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class _Batch:
    """What planning knows of `n` sequences. groups, episodes, lengths_tokens, trained_tokens: int64 [n]; groups and
    episodes, which not every aggregation asks for, are numbers in the order of their first appearance."""

    ids: Sequence[str]
    groups: _Numbers
    episodes: Callable[[], _Numbers]
    lengths_tokens: _Numbers
    trained_tokens: _Numbers

    def __post_init__(self) -> None:
        """Raises DataError for no sequence and for an id that occurs twice."""
        if not self.ids:
            raise DataError("there is nothing to pack: no sample was left")
        if len(set(self.ids)) < len(self.ids):
            twice = next(name for name, count in Counter(self.ids).items() if count > 1)
            raise DataError(f"sample id {twice} occurs twice in one batch: ids must be unique")


_Lay = Callable[[_Numbers, NDArray[np.float64], _Numbers], Iterator[PackFrame]]
"""Packs of sequences of a batch, from their indices, the weights of their tokens, and how many are in each pack."""


def _of_samples(samples: Sequence[Sample], limits: PackLimits) -> tuple[_Batch, _Lay]:
    table = SampleTable.of(samples)
    packer = SamplePacker(table, limits)
    episodes = partial(numbered, (sample.episode for sample in table.samples))
    return _Batch(packer.ids, table.groups, episodes, packer.lengths_tokens, table.trained_tokens), packer.packs


def _packed(
    batch: _Batch,
    lay: _Lay,
    limits: PackLimits,
    *,
    data_parallel: int,
    aggregation: Aggregation = "token_mean",
    norm_tokens: int = 1,
    updates: int = 1,
    cost: CostModel = proportional_cost,
) -> TrainingPacks:
    kept, oversize = _fitting(batch, limits)
    ranks: list[list[list[PackFrame]]] = [[] for _ in range(data_parallel)]
    plans: list[tuple[PackPlan, NDArray[np.int64]]] = []
    episodes = batch.episodes() if aggregation == "episode_mean" else np.arange(len(batch.ids))
    for step in _steps(kept, batch.groups, updates):
        lengths = batch.lengths_tokens[step]
        plan = plan_packs(lengths, limits, data_parallel, cost)
        plans.append((plan, lengths))
        weights = sequence_weights(
            batch.trained_tokens[step], batch.groups[step], aggregation, norm_tokens, episodes[step]
        )
        members = np.fromiter(chain.from_iterable(chain.from_iterable(plan.ranks)), np.int64)
        counts = np.array([len(pack) for packs in plan.ranks for pack in packs])
        laid = lay(step[members], weights[members], counts[counts > 0])
        for rank, packs in zip(ranks, plan.ranks, strict=True):
            rank.append(RankPacks(next(laid) if pack else dummy_pack(limits.pack_multiple) for pack in packs))
    trained = int(batch.trained_tokens[kept].sum())
    report = report_on(plans, limits, cost, trained, [batch.ids[index] for index in oversize])
    return TrainingPacks(ranks, report, tuple(lengths for _, lengths in plans))


def _fitting(batch: _Batch, limits: PackLimits) -> tuple[NDArray[np.int64], list[int]]:
    """Indices of the sequences that a pack can hold: int64 [k], and of those that none can."""
    fits = limits.padded_tokens(batch.lengths_tokens) <= limits.capacity_tokens
    if not fits.any():
        raise DataError(
            f"every sequence is longer than a pack of {limits.capacity_tokens} tokens: raise actor.max_tokens_per_gpu"
        )
    return np.flatnonzero(fits), np.flatnonzero(~fits).tolist()


def _steps(kept: NDArray[np.int64], groups: NDArray[np.int64], updates: int) -> list[NDArray[np.int64]]:
    """Indices of the sequences of each step, group after group."""
    kept = kept[np.argsort(groups[kept], kind="stable")]
    begins = np.append(np.flatnonzero(np.diff(groups[kept], prepend=-1)), len(kept))
    count = len(begins) - 1
    ends = begins[np.linspace(0, count, min(updates, count) + 1).astype(int)]
    return [kept[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]
