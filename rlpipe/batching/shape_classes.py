"""Packs of every class of shape that kernels compile for, to be met before the first iteration rather than in it."""

import numpy as np

from rlpipe.batching.build_pack import build_pack
from rlpipe.batching.limits import PackLimits
from rlpipe.batching.sequences import TrainingSequence
from rlpipe.shared.pack import Pack

_FEW = (1, 2, 3)
_MANY = 16
_LEAST_TOKENS = 2048
# What the last pack of an update may be left with. A norm's gradient over few rows is another kernel: seen on an H200
# with 786 tokens, and not with 1,497. Rows of a norm of heads are tokens times heads, so that fewer are met, too.
_SMALL_TOKENS = (768, 48)
# Triton compiles a kernel once for integer arguments that are multiples of this, and once for others.
_TRITON_MULTIPLE = 16


def shape_class_packs(limits: PackLimits, vocabulary: int, longest_tokens: int) -> list[Pack]:
    """Packs of one, two, three and many sequences; those of many have every length class, the largest pack first. Then
    come small packs of one sequence.

    The largest pack is filled by sequences of `longest_tokens` as far as many sequences allow: what passes keep depends
    on the kernels that long ones meet, and what this pack took is left free in every step (`actor/device_memory.py`).

    FlashQLA's block size follows from the number of sequences, and Triton has a variant of a kernel that takes the
    tokens of a pack for those that are a multiple of 16, unless it is told not to. Length classes are halves of the
    capacity down to 2,048 tokens. Tokens are random, so that experts are chosen about evenly; advantages alternate in
    sign.
    """
    generator = np.random.default_rng(0)
    lengths = _length_classes(limits)
    shapes = [_mostly_longest(longest_tokens, limits)]
    shapes += [_equal(tokens, _MANY, limits) for tokens in lengths[1:]]
    shapes += [_equal(lengths[-1], count, limits) for count in _FEW]
    uneven = _uneven_tokens(lengths[-1], limits)
    if uneven and not any(_padded_tokens(shape, limits) % _TRITON_MULTIPLE for shape in shapes):
        shapes.append([uneven])
    shapes += [shape for tokens in _SMALL_TOKENS if tokens < lengths[-1] for shape in _small(tokens, limits)]
    return [_pack(shape, limits, vocabulary, generator) for shape in shapes]


def _length_classes(limits: PackLimits) -> list[int]:
    """Falling, at least one: the capacity and its halves."""
    classes = [limits.capacity_tokens]
    while classes[-1] // 2 >= max(_LEAST_TOKENS, limits.pack_multiple):
        classes.append(classes[-1] // 2)
    return classes


def _mostly_longest(longest_tokens: int, limits: PackLimits) -> list[int]:
    """Lengths of a full pack of many sequences, as many as possible of the longest kind, the others equally short."""
    equal, multiple = _equal(limits.capacity_tokens, _MANY, limits), limits.sequence_multiple
    most = limits.capacity_tokens - max(equal[0], (_MANY - 1) * multiple)
    length = min(longest_tokens, most) // multiple * multiple
    if length <= equal[0]:
        return equal
    longest = [length] * min(most // length, _MANY - 1)
    rest, others = limits.capacity_tokens - sum(longest), _MANY - len(longest)
    short = [rest // others // multiple * multiple] * (others - 1)
    return [*longest, *short, (rest - sum(short)) // multiple * multiple]


def _equal(tokens: int, count: int, limits: PackLimits) -> list[int]:
    """Lengths of `count` sequences of at most `tokens` tokens together, or of as many as there is room for."""
    length = max(1, tokens // count // limits.sequence_multiple) * limits.sequence_multiple
    return [length] * max(1, min(count, limits.capacity_tokens // length))


def _uneven_tokens(tokens: int, limits: PackLimits) -> int:
    """The most tokens of a pack below `tokens` that are no multiple of 16; 0 where every pack has one."""
    largest = (tokens - 1) // limits.pack_multiple * limits.pack_multiple
    return next((one for one in (largest, largest - limits.pack_multiple) if one > 0 and one % _TRITON_MULTIPLE), 0)


def _small(tokens: int, limits: PackLimits) -> list[list[int]]:
    """Packs of about `tokens` tokens, a multiple of 16 and, where there are such, none."""
    uneven = _uneven_tokens(tokens, limits)
    return [_equal(tokens, 1, limits), *([[uneven]] if uneven else [])]


def _padded_tokens(lengths: list[int], limits: PackLimits) -> int:
    return -(-sum(lengths) // limits.pack_multiple) * limits.pack_multiple


def _pack(lengths: list[int], limits: PackLimits, vocabulary: int, generator: np.random.Generator) -> Pack:
    sequences = [_sequence(index, length, vocabulary, generator) for index, length in enumerate(lengths)]
    return build_pack(sequences, [1.0 / sum(lengths)] * len(lengths), limits)


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
