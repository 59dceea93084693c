"""The requests that warm an engine up meet every class of batch, and never more than the engine takes."""

import random
from bisect import bisect_left

import pytest

from rollout.warm_up_waves import EngineLimits, WaveRequest, decoding_waves, warm_up_waves

H200 = EngineLimits(running=128, request_tokens=4096, batch_tokens=16384, pool_tokens=2_000_000)
# SGLang's tuned tables of the fused-MoE kernel have these numbers of tokens; it takes the nearest.
MOE_TABLE = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)


def _prefills(limits: EngineLimits) -> list[list[WaveRequest]]:
    return [list(wave) for wave in warm_up_waves(limits)[:-1]]


def _moe_class(tokens: int) -> tuple[int, int]:
    """Blocks by the nearest entry; 8 choices a token are a multiple of 16 for an even number of tokens."""
    return min(MOE_TABLE, key=lambda entry: abs(entry - tokens)), tokens % 2


def _chunk_class(lengths: list[int]) -> int:
    chunks = sum(-(-length // 64) for length in lengths)
    return 0 if chunks <= 32 else 1 if chunks <= 128 else 2


def _sequence_class(count: int) -> tuple[int, bool, bool]:
    return (count - 1).bit_length(), count == 1, count % 16 == 0


def test_batches_of_random_lengths_belong_to_classes_that_the_warm_up_met():
    prefills = [[one.prompt_tokens for one in wave] for wave in _prefills(H200)]
    moe = {_moe_class(sum(lengths)) for lengths in prefills}
    chunks = {_chunk_class(lengths) for lengths in prefills}
    sequences = {_sequence_class(len(lengths)) for lengths in prefills}
    numbers = random.Random(0)
    for _ in range(3000):
        lengths = [numbers.randint(1, 500) for _ in range(numbers.randint(1, H200.running))]
        while sum(lengths) > H200.batch_tokens:
            lengths.pop()
        assert _moe_class(sum(lengths)) in moe
        assert _chunk_class(lengths) in chunks
        assert _sequence_class(len(lengths)) in sequences


@pytest.mark.parametrize("running", [1, 2, 7, 16, 48, 127, 128, 512])
def test_decoding_meets_every_class_of_batch_size(running):
    limits = EngineLimits(running, request_tokens=4096, batch_tokens=8192, pool_tokens=4096 * running)
    (wave,) = decoding_waves(limits)
    sizes = {sum(one.new_tokens > step for one in wave) for step in range(1, max(one.new_tokens for one in wave))}
    met = {_sequence_class(size) for size in sizes}
    assert {_sequence_class(size) for size in range(1, running + 1)} <= met
    assert max(one.new_tokens for one in wave) < 100, "a warm-up must be short"


@pytest.mark.parametrize(
    "limits",
    [
        H200,
        EngineLimits(running=1, request_tokens=2, batch_tokens=1, pool_tokens=2),
        EngineLimits(running=2, request_tokens=6, batch_tokens=16384, pool_tokens=20),
        EngineLimits(running=8, request_tokens=70, batch_tokens=16384, pool_tokens=700),
        EngineLimits(running=256, request_tokens=131072, batch_tokens=8192, pool_tokens=150_000),
        EngineLimits(running=8, request_tokens=70, batch_tokens=16384, pool_tokens=700, step_tokens=64),
    ],
)
def test_every_wave_fits(limits):
    waves = warm_up_waves(limits)
    assert waves
    for wave in waves:
        assert 1 <= len(wave) <= limits.running
        assert sum(one.prompt_tokens + one.new_tokens for one in wave) <= limits.pool_tokens
        for one in wave:
            assert one.prompt_tokens >= 1
            assert one.new_tokens >= 1
            assert one.prompt_tokens + one.new_tokens <= limits.request_tokens


def test_a_prompt_is_met_whose_beginning_is_cached():
    waves = warm_up_waves(H200)
    first = next(index for index, wave in enumerate(waves) if any(one.prefix is not None for one in wave))
    assert len(waves[first]) == 1
    assert [one.prefix for one in waves[first + 1]] == [waves[first][0].prefix] * 2


GRAPHS = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 513, 16))
"""That SGLang captures."""


@pytest.mark.parametrize("running", [1, 7, 16, 33, 65, 128, 512])
def test_decoding_meets_every_pair_of_a_batch_and_the_graph_it_takes(running):
    graphs = tuple(sorted({*(size for size in GRAPHS if size <= running), running}))
    limits = EngineLimits(running, 4096, batch_tokens=8192, pool_tokens=4096 * running, graph_sizes=graphs)
    (wave,) = decoding_waves(limits)
    longest = max(one.new_tokens for one in wave)
    sizes = {sum(one.new_tokens > step for one in wave) for step in range(1, longest)}

    def pair(count: int) -> tuple[tuple[int, bool, bool], ...]:
        return _sequence_class(count), _sequence_class(graphs[bisect_left(graphs, count)])

    assert {pair(size) for size in range(1, running + 1)} <= {pair(size) for size in sizes}
    assert longest < 150, "a warm-up must be short"


@pytest.mark.parametrize("running", [1, 33, 128])
def test_drafts_that_are_kept_by_chance_pass_no_size_by(running):
    limits = EngineLimits(running, 4096, batch_tokens=8192, pool_tokens=4096 * running, step_tokens=5)
    waves = decoding_waves(limits)
    assert {_sequence_class(len(wave)) for wave in waves} == {_sequence_class(size) for size in range(1, running + 1)}
    assert all(one.new_tokens > 2 * limits.step_tokens for wave in waves for one in wave)
    assert warm_up_waves(limits)[-len(waves) :] == waves
