"""Lay sequences end to end into a pack."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlpipe.batching.limits import PackLimits
from rlpipe.batching.sequences import TrainingSequence
from rlpipe.shared.pack import Pack


def build_pack(sequences: Sequence[TrainingSequence], token_weights: Sequence[float], limits: PackLimits) -> Pack:
    """A pack of at least one sequence, in the given order; `token_weights` has the loss weight of each one's tokens.

    Each sequence is padded to `limits.sequence_multiple`, the last one further so that the pack meets
    `limits.pack_multiple`. Padding is token 0, mask 0, with positions that go on counting.
    """
    lengths, counts = np.array([sequence.tokens for sequence in sequences]), np.array([len(sequences)])
    padded = padded_pack_ends(lengths, counts, limits)
    starts, ends = padded[:-1], padded[1:]
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
        cu_seqlens=tuple(pack_ends(lengths, counts).tolist()),
        cu_seqlens_padded=tuple(padded.tolist()),
    )


def pack_ends(lengths_tokens: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the sequences of packs end in theirs, laid without padding: int64 [n + packs], with a 0 before the first of
    each pack.

    lengths_tokens: int64 [n], of the first `counts[0]` sequences, of the next `counts[1]`, and so on; at least one in
    each.
    """
    packs, lasts, ends = np.arange(len(counts)), np.cumsum(counts), np.cumsum(lengths_tokens)
    before = np.concatenate(([0], ends[lasts[:-1] - 1]))
    found = np.zeros(len(ends) + len(packs), np.int64)
    found[np.arange(len(ends)) + np.repeat(packs, counts) + 1] = ends - np.repeat(before, counts)
    return found


def padded_pack_ends(
    lengths_tokens: NDArray[np.int64], counts: NDArray[np.int64], limits: PackLimits
) -> NDArray[np.int64]:
    """`pack_ends` of sequences that are each padded to `limits.sequence_multiple`, the last one of a pack further so
    that the pack meets `limits.pack_multiple`."""
    ends = pack_ends(limits.padded_tokens(lengths_tokens), counts)
    lasts = np.cumsum(counts) + np.arange(len(counts))
    ends[lasts] = -(-ends[lasts] // limits.pack_multiple) * limits.pack_multiple
    return ends
