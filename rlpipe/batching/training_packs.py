"""The packs of one iteration: for the update, for passes without gradients, and for supervised training."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlpipe.batching.aggregation import Aggregation, sequence_weights
from rlpipe.batching.build_pack import build_pack
from rlpipe.batching.limits import PackLimits
from rlpipe.batching.pack_plan import CostModel, PackPlan, plan_packs, proportional_cost
from rlpipe.batching.pack_report import PackReport, report_on
from rlpipe.batching.sequences import TrainingSequence, sequence_of
from rlpipe.shared.errors import DataError
from rlpipe.shared.pack import Pack, dummy_pack
from rlpipe.shared.sample import Sample


@dataclass(frozen=True)
class TrainingPacks:
    """`ranks[data_rank][step]` is the list of packs of one optimizer step; equal shapes on all ranks.

    step_lengths_tokens: real lengths (int64 [n]) of each step's sequences, what `advise_budget` asks for.
    """

    ranks: list[list[list[Pack]]]
    report: PackReport
    step_lengths_tokens: tuple[NDArray[np.int64], ...]


@dataclass(frozen=True)
class ForwardPacks:
    """`ranks[data_rank]` is a list of packs; equal counts on all ranks."""

    ranks: list[list[Pack]]
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
    for sample in samples:
        if sample.advantage is None:
            raise DataError(f"sample {sample.sample_id} has no advantage: compute advantages before packing")
    sequences = [sequence_of(sample) for sample in samples]
    return pack_sequences(
        sequences,
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
    _check_ids([sequence.sequence_id for sequence in sequences])
    kept, oversize = _fitting(sequences, limits)
    ranks: list[list[list[Pack]]] = [[] for _ in range(data_parallel)]
    plans: list[tuple[PackPlan, NDArray[np.int64]]] = []
    for step in _steps(kept, updates):
        lengths = _lengths(step)
        plan = plan_packs(lengths, limits, data_parallel, cost)
        plans.append((plan, lengths))
        weights = _weights(step, aggregation, norm_tokens)
        for rank, packs in zip(ranks, plan.ranks, strict=True):
            rank.append([_lay(pack, step, weights, limits) for pack in packs])
    trained = sum(sequence.trained_tokens for sequence in kept)
    report = report_on(plans, limits, cost, trained, oversize)
    return TrainingPacks(ranks, report, tuple(lengths for _, lengths in plans))


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
    packed = pack_sequences(
        [sequence_of(sample) for sample in samples],
        limits,
        data_parallel=data_parallel,
        cost=cost,
    )
    return ForwardPacks([rank[0] for rank in packed.ranks], packed.report)


def _check_ids(sequence_ids: Sequence[str]) -> None:
    if not sequence_ids:
        raise DataError("there is nothing to pack: no sample was left")
    seen: set[str] = set()
    for sequence_id in sequence_ids:
        if sequence_id in seen:
            raise DataError(f"sample id {sequence_id} occurs twice in one batch: ids must be unique")
        seen.add(sequence_id)


def _fitting(
    sequences: Sequence[TrainingSequence], limits: PackLimits
) -> tuple[list[TrainingSequence], tuple[str, ...]]:
    fits = limits.padded_tokens(_lengths(sequences)) <= limits.capacity_tokens
    kept = [sequence for sequence, fit in zip(sequences, fits, strict=True) if fit]
    oversize = tuple(sequence.sequence_id for sequence, fit in zip(sequences, fits, strict=True) if not fit)
    if not kept:
        raise DataError(
            f"every sequence is longer than a pack of {limits.capacity_tokens} tokens: raise actor.max_tokens_per_gpu"
        )
    return kept, oversize


def _steps(sequences: Sequence[TrainingSequence], updates: int) -> list[list[TrainingSequence]]:
    groups: dict[str, list[TrainingSequence]] = {}
    for sequence in sequences:
        groups.setdefault(sequence.group_id, []).append(sequence)
    members = list(groups.values())
    ends = np.linspace(0, len(members), min(updates, len(members)) + 1).astype(int).tolist()
    return [
        [sequence for group in members[start:end] for sequence in group]
        for start, end in zip(ends, ends[1:], strict=False)
    ]


def _weights(step: Sequence[TrainingSequence], aggregation: Aggregation, norm_tokens: int) -> NDArray[np.float64]:
    groups = _numbers([sequence.group_id for sequence in step])
    episodes = _numbers([sequence.episode for sequence in step])
    trained = np.array([sequence.trained_tokens for sequence in step])
    return sequence_weights(trained, groups, aggregation, norm_tokens, episodes)


def _numbers(names: Sequence[str]) -> NDArray[np.int64]:
    """Each name as a number, 0, 1, ... in order of first appearance: int64 [n]."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


def _lay(
    pack: Sequence[int], step: Sequence[TrainingSequence], weights: NDArray[np.float64], limits: PackLimits
) -> Pack:
    if not pack:
        return dummy_pack(limits.pack_multiple)
    return build_pack([step[i] for i in pack], [float(weights[i]) for i in pack], limits)


def _lengths(sequences: Sequence[TrainingSequence]) -> NDArray[np.int64]:
    return np.array([sequence.tokens for sequence in sequences], dtype=np.int64)
