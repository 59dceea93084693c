"""Requests after which an engine has met every class of batch that its kernels compile for. Pure.

What kernels compile for in SGLang, next to the model's own sizes:
  prefill  the fused-MoE kernel's blocks follow from the tokens of the batch (the nearest entry of its table: powers of
           two and halves between them), its integer arguments are multiples of 16 or not; Gated DeltaNet's state kernel
           has three classes of chunks of 64 tokens; norms follow from tokens over streaming multiprocessors; metadata
           kernels from the next power of two of the number of sequences.
  decode   graphs are captured at the start; what runs beside them follows from the next power of two of the number of
           sequences, and from whether that is 1 or a multiple of 16; what fills a graph's states in, from the same of
           the graph's number as well.
"""

from dataclasses import dataclass
from itertools import chain

_CHUNK_TOKENS = 64
_SEVERAL_CHUNKS_TOKENS = 2 * _CHUNK_TOKENS - 1
_STEPS_AT_A_SIZE = 2


@dataclass(frozen=True)
class WaveRequest:
    """One request. `prefix`: requests with the same number have the same prompt; None for a prompt of its own."""

    prompt_tokens: int
    new_tokens: int
    prefix: int | None = None


Wave = tuple[WaveRequest, ...]
"""Sent together, and answered before the next one."""


@dataclass(frozen=True)
class EngineLimits:
    """running: requests at a time. request_tokens: longest prompt plus response. batch_tokens: most prompt tokens that
    one pass computes. pool_tokens: room for keys and values. graph_sizes: of batches that graphs of decoding are
    captured for, rising; any other takes the next larger one. step_tokens: the most that a step adds to a response:
    1 without drafts."""

    running: int
    request_tokens: int
    batch_tokens: int
    pool_tokens: int
    graph_sizes: tuple[int, ...] = ()
    step_tokens: int = 1


def warm_up_waves(limits: EngineLimits) -> list[Wave]:
    """Every class of batch: prefill by tokens, by sequences, with a cached prefix; then all sizes of decoding."""
    prefill = [_split(tokens, limits) for tokens in token_classes(limits.batch_tokens)]
    sequences = [_sequences(count, limits) for count in sequence_classes(limits.running)]
    return [wave for wave in (*prefill, *sequences, *_shared_prefix(limits), *decoding_waves(limits)) if wave]


def token_classes(most: int) -> list[int]:
    """Rising: powers of two, the numbers half-way between, and an odd neighbour of each, at most `most`."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    rungs = chain(powers, (3 * power // 2 for power in powers if power > 1), [most])
    return sorted({near for rung in rungs for near in (rung, rung + 1 - rung % 2 * 2) if 1 <= near <= most})


def sequence_classes(most: int) -> list[int]:
    """Rising: of each class with the same next power of two its largest, its smallest and one multiple of 16."""
    found = {most}
    for exponent in range(most.bit_length() + 1):
        largest, smallest = 1 << exponent, (1 << exponent) // 2 + 1
        found |= {largest, smallest, -(-smallest // 16) * 16 if largest > 16 else largest}
    return sorted(count for count in found if 1 <= count <= most)


def decoding_classes(limits: EngineLimits) -> list[int]:
    """Rising: those of `sequence_classes`, and one of each pair of classes of a batch and of the graph it takes."""
    pairs: dict[tuple[tuple[int, bool, bool], ...], int] = {}
    for count in range(1, limits.running + 1):
        graph = next((size for size in limits.graph_sizes if size >= count), count)
        pairs.setdefault((_size_class(count), _size_class(graph)), count)
    return sorted({*sequence_classes(limits.running), *pairs.values()})


def _size_class(count: int) -> tuple[int, bool, bool]:
    """What a kernel that is launched for `count` sequences compiles for."""
    return (count - 1).bit_length(), count == 1, count % 16 == 0


def _split(tokens: int, limits: EngineLimits) -> Wave:
    """Prompts of `tokens` tokens together, as few as possible; () where they do not fit."""
    longest = limits.request_tokens - 1
    count = -(-tokens // longest)
    if count > limits.running or tokens + count > limits.pool_tokens:
        return ()
    return tuple(WaveRequest(tokens // count + (index < tokens % count), 1) for index in range(count))


def _sequences(count: int, limits: EngineLimits) -> Wave:
    """So many prompts of two chunks, or shorter ones where they do not fit into one pass."""
    room = min(limits.batch_tokens, limits.pool_tokens - count) // count
    tokens = min(_SEVERAL_CHUNKS_TOKENS, limits.request_tokens - 1, room)
    return tuple(WaveRequest(tokens, 1) for _ in range(count)) if tokens > 0 else ()


def _shared_prefix(limits: EngineLimits) -> tuple[Wave, ...]:
    """One prompt, and then others that begin like it, whose first tokens are cached by then."""
    tokens = min(4 * _CHUNK_TOKENS, limits.request_tokens - 1, limits.pool_tokens // 4)
    one = WaveRequest(tokens, 1, prefix=0)
    return ((one,), (one,) * min(2, limits.running)) if tokens > 0 else ()


def decoding_waves(limits: EngineLimits) -> list[Wave]:
    """Waves in which every class of batch size decodes for two steps."""
    prompt = min(8, limits.request_tokens - 1)
    most = min(limits.request_tokens - prompt, limits.pool_tokens // limits.running - prompt)
    sizes = decoding_classes(limits)
    if most < 1:
        return []
    if limits.step_tokens > 1:
        # How many tokens a step adds is chance, so a batch that shrinks would pass sizes by.
        tokens = min(most, 1 + _STEPS_AT_A_SIZE * limits.step_tokens)
        return [(WaveRequest(prompt, tokens),) * size for size in sizes]
    # As many as run at a time, which end one after the other.
    ends = (1 + _STEPS_AT_A_SIZE * sum(size > rank for size in sizes) for rank in range(limits.running))
    return [tuple(WaveRequest(prompt, min(most, end)) for end in ends)]
