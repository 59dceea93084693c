"""Packs of every class of shape that kernels compile for, to be met before the first iteration rather than in it."""

import numpy as np

from rlpipe.batching.build_pack import build_pack
from rlpipe.batching.limits import PackLimits
from rlpipe.batching.sequences import TrainingSequence
from rlpipe.shared.pack import Pack

_FEW = (1, 2, 3)
_MANY = 16
# Tokens after which FLA's normalization of 32 heads has another cache key (rows / 65536).
_LENGTH_STEP_TOKENS = 2048


def shape_class_packs(limits: PackLimits, vocabulary: int) -> list[Pack]:
    """Packs of one, two, three and many sequences; those of many have every length class, the largest pack first.

    FlashQLA's block size follows from the number of sequences, FLA's cache keys from the tokens of a pack. Length
    classes are halves of the capacity down to one step of those keys. Tokens are random, so that experts are chosen
    about evenly; advantages alternate in sign.
    """
    generator = np.random.default_rng(0)
    lengths = _length_classes(limits)
    shapes = [(tokens, _MANY) for tokens in lengths] + [(lengths[-1], count) for count in _FEW]
    return [_pack(tokens, count, limits, vocabulary, generator) for tokens, count in shapes]


def _length_classes(limits: PackLimits) -> list[int]:
    """Falling, at least one: the capacity and its halves."""
    classes = [limits.capacity_tokens]
    while classes[-1] // 2 >= max(_LENGTH_STEP_TOKENS, limits.pack_multiple):
        classes.append(classes[-1] // 2)
    return classes


def _pack(tokens: int, count: int, limits: PackLimits, vocabulary: int, generator: np.random.Generator) -> Pack:
    """At most `tokens` tokens, in `count` sequences or in as many as there is room for."""
    length = max(1, tokens // count // limits.sequence_multiple) * limits.sequence_multiple
    count = max(1, min(count, limits.capacity_tokens // length))
    sequences = [_sequence(index, length, vocabulary, generator) for index in range(count)]
    return build_pack(sequences, [1.0 / (count * length)] * count, limits)


def _sequence(index: int, length: int, vocabulary: int, generator: np.random.Generator) -> TrainingSequence:
    trained = np.ones(length, np.float32)
    trained[-1] = 0
    return TrainingSequence(
        sequence_id=f"warm-up-{index}",
        group_id="warm-up",
        token_ids=generator.integers(0, vocabulary, length, dtype=np.int64),
        loss_mask=trained,
        advantages=trained * (1 if index % 2 else -1),
        rollout_logprobs=trained * -np.float32(np.log(vocabulary)),
    )
