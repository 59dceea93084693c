"""Samples with columns: those of groups that were finished one after another say what a look at all samples says."""

import functools
import math
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.algorithms import compute_advantages
from rlpipe.algorithms.advantages import STD_EPSILON
from rlpipe.batching import PackLimits, pack_for_training
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.shared.errors import DataError
from rlpipe.shared.number_arrays import Logprobs, LossMask, TokenIds
from rlpipe.shared.sample import Prompt, Reward, Sample, Status, VersionSpan
from rlpipe.shared.sample_table import SampleTable

COLUMNS = ("groups", "prompt_tokens", "response_tokens", "trained_tokens", "failed", "uneven", "of_episodes", "scores")


def sample_of(number: int, group: str, score: float, tokens: int = 3, failed: bool = False, masked: int = 0) -> Sample:
    return Sample(
        sample_id=str(number),
        group_id=group,
        prompt=Prompt(group, "", (1, 2), "", "test"),
        response_ids=TokenIds.filled(number, tokens),
        response_text="",
        rollout_logprobs=Logprobs.filled(-1.0, tokens),
        loss_mask=LossMask([0] * masked + [1] * (tokens - masked)),
        versions=(VersionSpan(0, tokens),),
        status=Status.FAILED if failed else Status.COMPLETED,
        engine=0,
        reward=Reward(score, None, ""),
    )


SCORES = st.sampled_from([0.0, 1.0, 0.1, 0.3, 1 / 3, -2.7])
ROWS = st.tuples(st.integers(0, 5), SCORES, st.integers(1, 9), st.booleans(), st.integers(0, 1))
BATCHES = st.lists(ROWS, min_size=1, max_size=40).map(
    lambda rows: [sample_of(number, f"g{group}", *rest) for number, (group, *rest) in enumerate(rows)]
)


def same_columns(one: SampleTable, other: SampleTable) -> bool:
    for found, wanted in zip(one.content.lists, other.content.lists, strict=True):
        if [_plain(entry) for entry in found] != [_plain(entry) for entry in wanted]:
            return False
    return all(np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True) for name in COLUMNS)


def _plain(entry: object) -> object:
    return entry if isinstance(entry, str | float) else bytes(entry)


@settings(max_examples=40)
@given(samples=BATCHES)
def test_tables_of_groups_joined_are_the_table_of_all(samples):
    groups = {name: [one for one in samples if one.group_id == name] for name in (one.group_id for one in samples)}
    in_order = [one for group in groups.values() for one in group]
    joined = SampleTable.joined([SampleTable.of(group) for group in groups.values()])
    assert list(joined) == in_order and joined[-1] == in_order[-1] and joined[::2] == in_order[::2]
    assert same_columns(joined, SampleTable.of(in_order)) and len(joined) == len(in_order)
    masked = [
        one.changed(loss_mask=LossMask.filled(0, one.response_tokens), response_ids=TokenIds.filled(7, 2))
        for one in in_order[::3]
    ]
    changed = [masked[place // 3] if place % 3 == 0 else one for place, one in enumerate(in_order)]
    assert same_columns(joined.with_samples(changed), SampleTable.of(changed))


def test_samples_with_a_prompt_in_common_have_its_memory_in_common():
    first, second = sample_of(1, "g", 0.0), sample_of(2, "g", 1.0)
    other = sample_of(3, "h", 1.0)
    second = second.changed(prompt=first.prompt)
    one, two, three = SampleTable.of(
        [first, second, other.changed(prompt=Prompt("h", "", (3,), "", "test"))]
    ).content.prompts
    assert one is two and np.frombuffer(one, np.int32).tolist() == [1, 2]
    assert np.frombuffer(three, np.int32).tolist() == [3]


def test_columns_by_hand():
    without = sample_of(2, "a", 0.0, tokens=4, masked=3).changed(reward=None)
    short = sample_of(1, "b", 1.0, failed=True).changed(rollout_logprobs=Logprobs((-1.0,)))
    table = SampleTable.of([sample_of(0, "a", 0.5), short, without.changed(episode_id="e")])
    assert table.groups.tolist() == [0, 1, 0] and table.prompt_tokens.tolist() == [2, 2, 2]
    assert table.response_tokens.tolist() == [3, 3, 4] and table.trained_tokens.tolist() == [3, 3, 1]
    assert table.failed.tolist() == [False, True, False] == table.uneven.tolist()
    assert table.of_episodes.tolist() == [False, False, True]
    assert table.scores.tolist()[:2] == [0.5, 1.0] and math.isnan(table.scores[2])


def test_a_sample_with_an_advantage_for_each_token_has_their_mean_as_its_own():
    table = SampleTable.of([sample_of(0, "a", 0.5, tokens=2), sample_of(1, "a", 1.0, tokens=0), sample_of(2, "b", 0.0)])
    with_them = table.with_advantages([np.array([1.0, 2.0]), np.array([]), 0.25])
    assert [one.advantage for one in with_them] == [1.5, 0.0, 0.25]
    assert [one.token_advantages for one in with_them] == [(1.0, 2.0), (), None]
    again = SampleTable.of(list(with_them)).advantages
    np.testing.assert_array_equal(again[0], [1.0, 2.0])
    assert len(again[1]) == 0 and again[2] == 0.25


def one_group(scores: list[float], config: AlgorithmConfig) -> list[float]:
    """Advantages as the papers state them, in Python's numbers."""
    size = len(scores)
    mean = _added_up(scores) / size
    centred = [0.0 if min(scores) == max(scores) else score - mean for score in scores]
    if config.advantage == "rloo":
        return [one * size / max(size - 1, 1) for one in centred]
    if config.advantage == "dr_grpo" or not config.normalize_by_std:
        return centred
    spread = math.sqrt(_added_up([one * one for one in centred]) / max(size - 1, 1))
    return [one / (spread + STD_EPSILON) for one in centred]


def _added_up(values: list[float]) -> float:
    """One after the other: `sum` corrects what rounding loses from Python 3.12 on."""
    return functools.reduce(operator.add, values)


@pytest.mark.parametrize(
    ("advantage", "normalize"), [("grpo", True), ("grpo", False), ("dr_grpo", False), ("rloo", False)]
)
@settings(max_examples=40)
@given(samples=BATCHES)
def test_advantages_of_all_groups_at_once_are_those_of_each_group_to_the_last_bit(advantage, normalize, samples):
    config = AlgorithmConfig(advantage=advantage, normalize_by_std=normalize, aggregation="sequence_sum_norm")
    usable = [one for one in samples if one.status is not Status.FAILED]
    if not usable:
        with pytest.raises(DataError, match="all failed"):
            compute_advantages(samples, config, max_response_tokens=9)
        return
    result = compute_advantages(samples, config, max_response_tokens=9)
    expected = {}
    for name in {one.group_id for one in usable}:
        group = [one for one in usable if one.group_id == name]
        values = one_group([one.reward.score for one in group], config)
        expected |= {one.sample_id: value for one, value in zip(group, values, strict=True)}
    assert [one.sample_id for one in result.samples] == [one.sample_id for one in usable]
    assert [one.advantage for one in result.samples] == [expected[one.sample_id] for one in usable]


@settings(max_examples=20)
@given(samples=BATCHES, ranks=st.integers(1, 3), updates=st.integers(1, 2))
def test_packs_of_a_table_with_advantages_are_those_of_samples_that_have_them(samples, ranks, updates):
    if all(one.status is Status.FAILED for one in samples):
        return
    table = compute_advantages(samples, AlgorithmConfig(), max_response_tokens=9).samples
    options = dict(data_parallel=ranks, aggregation="group_mean", norm_tokens=1, updates=updates)
    first, second = (pack_for_training(one, PackLimits(24, 4, 12), **options) for one in (table, list(table)))
    assert first.report == second.report
    for packed, other in zip(*([p for r in x.ranks for s in r for p in s] for x in (first, second)), strict=True):
        laid = other.laid_out()
        for name, content in vars(packed.laid_out()).items():
            np.testing.assert_array_equal(content, getattr(laid, name))
