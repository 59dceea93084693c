"""Packs of a supervised step."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rlpipe.batching import CostModel, PackLimits, TrainingPacks, pack_sequences
from rlpipe.batching.sequences import TrainingSequence
from rlpipe.config.actor import ActorConfig


def supervised_packs(
    sequences: Sequence[TrainingSequence],
    actor: ActorConfig,
    *,
    data_parallel: int,
    cost: CostModel,
    wrapped: bool = False,
) -> TrainingPacks:
    """One optimizer step over `sequences`; the loss is the mean over all trained tokens. A sequence may be there more
    than once: an epoch may end, and the next begin, within a step."""
    limits = PackLimits.training(actor)
    named = list(_named_apart(sequences))
    laid = list(wrap(named, limits.capacity_tokens)) if wrapped else named
    return pack_sequences(laid, limits, data_parallel=data_parallel, cost=cost)


def _named_apart(sequences: Sequence[TrainingSequence]) -> Iterator[TrainingSequence]:
    times: Counter[str] = Counter()
    for sequence in sequences:
        times[sequence.sequence_id] += 1
        number = times[sequence.sequence_id]
        yield sequence if number == 1 else replace(sequence, sequence_id=f"{sequence.sequence_id}@{number}")


def wrap(sequences: Sequence[TrainingSequence], capacity_tokens: int) -> Iterator[TrainingSequence]:
    """The sequences laid end to end and cut at every multiple of `capacity_tokens`.

    A piece keeps the target of its last token only inside the piece, so each cut costs one trained token.
    """
    room = capacity_tokens
    for sequence in sequences:
        start = 0
        while start < sequence.tokens:
            stop = min(start + room, sequence.tokens)
            yield _piece(sequence, start, stop)
            room = room - (stop - start) or capacity_tokens
            start = stop


def _piece(sequence: TrainingSequence, start: int, stop: int) -> TrainingSequence:
    if (start, stop) == (0, sequence.tokens):
        return sequence
    inside = np.arange(start, stop) < stop - 1
    return replace(
        sequence,
        sequence_id=f"{sequence.sequence_id}#{start}",
        token_ids=sequence.token_ids[start:stop],
        loss_mask=sequence.loss_mask[start:stop] * inside,
        advantages=sequence.advantages[start:stop],
        rollout_logprobs=sequence.rollout_logprobs[start:stop],
    )
