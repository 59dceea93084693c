"""Numbers that the two sides of an engine count requests and responses by."""

import hashlib
from dataclasses import replace

import pytest

from rlpipe.shared.sample import Status
from rollout.partial_response import PartialResponse
from rollout.requests import (
    EngineUsage,
    GenerateRequest,
    Generation,
    SamplingParameters,
    added_counts,
    sample_seed,
)

SAMPLING = SamplingParameters(20, temperature=0.5, stop=("a",), stop_token_ids=(3,))
REQUEST = GenerateRequest("r", (1, 2, 3), SAMPLING, seed=0)


@pytest.mark.parametrize(
    ("limit", "stop", "expected"),
    [
        (20, (), SAMPLING),
        (7, (), replace(SAMPLING, max_new_tokens=7)),
        (20, ("b",), replace(SAMPLING, stop=("a", "b"))),
        (7, ("b", "c"), replace(SAMPLING, max_new_tokens=7, stop=("a", "b", "c"))),
    ],
)
def test_a_turn_has_its_own_limit_and_further_stops(limit, stop, expected):
    assert SAMPLING.limited(limit, stop) == expected


def test_a_request_is_as_long_as_its_prompt_and_what_is_to_come():
    partial = PartialResponse().extended((4, 5), (-0.1, -0.2), version=1)
    assert (REQUEST.most_tokens, REQUEST.read_tokens, REQUEST.likely_tokens) == (23, 3, 23)
    assert replace(REQUEST, partial=partial).read_tokens == 5
    for expected, likely in ((0, 3), (5, 8), (20, 23), (21, 23)):
        assert replace(REQUEST, expected_tokens=expected).likely_tokens == likely


def test_work_of_two_engines_for_one_response_adds_up():
    first = Generation("r", (4,), (-0.1,), Status.ABORTED, (), 0, 2.0, 1, None, 30, 20, (5, 1), "x")
    last = Generation("r", (4, 5), (-0.1, -0.2), Status.COMPLETED, (), 1, 3.5, 2, None, 31, 4, (1, 2, 7), "xy")
    both = last.with_work_of(first)
    assert (both.seconds, both.retractions, both.prompt_tokens, both.cached_tokens) == (5.5, 3, 61, 24)
    assert both.kept_drafts == (6, 3, 7)
    assert (both.token_ids, both.status, both.engine, both.text) == ((4, 5), Status.COMPLETED, 1, "xy")


@pytest.mark.parametrize(
    ("one", "other", "sums"), [((), (), ()), ((1,), (), (1,)), ((), (2, 3), (2, 3)), ((1, 4, 5), (2,), (3, 4, 5))]
)
def test_counts_of_unequal_lengths_add_up(one, other, sums):
    assert added_counts(one, other) == sums


def test_an_engine_is_as_fast_as_it_was_while_it_worked():
    usage = EngineUsage(0, interval_seconds=10.0, busy_seconds=4.0, response_tokens=100, requests=2, retractions=0)
    assert usage.tokens_per_second == 25.0
    assert replace(usage, busy_seconds=0.0, response_tokens=0).tokens_per_second == 0.0


def test_seeds_of_samples_stay_those_of_runs_that_are_resumed():
    assert sample_seed(7, "3-1") == 5584579747993165391
    by_hand = hashlib.sha256(b"7/3-1").hexdigest()[:16]
    assert sample_seed(7, "3-1") == int(by_hand, 16) // 2
    seeds = {sample_seed(run, f"{group}-{sample}") for run in (0, 1) for group in range(10) for sample in range(10)}
    assert len(seeds) == 200 and all(0 <= seed < 2**63 for seed in seeds)
