"""Lay sequences end to end into a pack."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from rlpipe.batching.limits import PackLimits
from rlpipe.batching.sequences import TrainingSequence
from rlpipe.shared.pack import Pack


def build_pack(sequences: Sequence[TrainingSequence], token_weights: Sequence[float], limits: PackLimits) -> Pack:
    """A pack of at least one sequence, in the given order; `token_weights` has the loss weight of each one's tokens.

    Each sequence is padded to `limits.sequence_multiple`, the last one further so that the pack meets
    `limits.pack_multiple`. Padding is token 0, mask 0, with positions that go on counting.
    """
    lengths = [sequence.tokens for sequence in sequences]
    ends = np.array(padded_ends(lengths, limits))
    starts = np.concatenate(([0], ends[:-1]))
    total = int(ends[-1])
    tokens, targets = np.zeros(total, np.int64), np.zeros(total, np.int64)
    positions = np.arange(total) - np.repeat(starts, ends - starts)
    mask, weights = np.zeros(total, np.float32), np.zeros(total, np.float32)
    temperatures = np.ones(total, np.float32)
    advantages, rollout_logprobs = np.zeros(total, np.float32), np.zeros(total, np.float32)
    for sequence, weight, start in zip(sequences, token_weights, starts.tolist(), strict=True):
        span = slice(start, start + sequence.tokens)
        tokens[span] = sequence.token_ids
        targets[start : span.stop - 1] = sequence.token_ids[1:]
        mask[span] = sequence.loss_mask
        weights[span] = sequence.loss_mask * np.float32(weight)
        advantages[span] = sequence.advantages
        rollout_logprobs[span] = sequence.rollout_logprobs
        temperatures[span] = sequence.temperature
    return Pack(
        sample_ids=tuple(sequence.sequence_id for sequence in sequences),
        token_ids=tokens,
        targets=targets,
        position_ids=positions,
        loss_mask=mask,
        loss_weights=weights,
        advantages=advantages,
        rollout_logprobs=rollout_logprobs,
        temperatures=temperatures if (temperatures != 1).any() else None,
        cu_seqlens=(0, *accumulate(lengths)),
        cu_seqlens_padded=(0, *ends.tolist()),
    )


def padded_ends(lengths_tokens: Sequence[int], limits: PackLimits) -> list[int]:
    """Where sequences of these real lengths end in their pack, each padded to `limits.sequence_multiple`, the last one
    further so that the pack meets `limits.pack_multiple`."""
    multiple = limits.sequence_multiple
    ends = list(accumulate([-(-tokens // multiple) * multiple for tokens in lengths_tokens]))
    ends[-1] = -(-ends[-1] // limits.pack_multiple) * limits.pack_multiple
    return ends
