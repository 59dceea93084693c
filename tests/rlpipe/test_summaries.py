"""What an iteration's row says of its samples and engines, by hand."""

from dataclasses import replace

import pytest

from rlpipe.generation.group_source import Batch
from rlpipe.shared.sample import Prompt, Reward, Sample, Status, VersionSpan
from rlpipe.shared.sample_table import SampleTable
from rlpipe.training.summaries import cache_metrics, fault_metrics, generation_metrics, rollout_metrics, start_metrics
from rollout.dispatch import RoutingCounts
from rollout.requests import EngineUsage

PROMPT = Prompt("p", "", (1, 2, 3), "", "data")
ENGINES = [EngineUsage(0, 4.0, 4.0, 160, 8, 0), EngineUsage(1, 4.0, 1.0, 40, 2, 0), EngineUsage(2, 4.0, 0.0, 0, 0, 0)]


def sample_of(number: int, response: tuple[int, ...], reward: Reward | None, status=Status.COMPLETED) -> Sample:
    tokens = len(response)
    return Sample(
        sample_id=str(number),
        group_id=str(number // 2),
        prompt=PROMPT,
        response_ids=response,
        response_text="",
        rollout_logprobs=(-1.0,) * tokens,
        loss_mask=(1,) * tokens,
        versions=(VersionSpan(0, tokens),),
        status=status,
        engine=0,
        reward=reward,
    )


def samples_of_an_iteration() -> list[Sample]:
    return [
        sample_of(0, (4, 5), Reward(1.0, True, "")),
        sample_of(1, (4, 5, 6, 7), Reward(0.0, False, ""), Status.TRUNCATED),
        sample_of(2, (8,), Reward(0.5, None, "")),
        sample_of(3, (9,), Reward(0.0, False, ""), Status.FAILED),
    ]


def test_samples_are_counted_and_their_scores_and_lengths_are_averaged():
    metrics = rollout_metrics(samples_of_an_iteration(), 0)
    shared = metrics.pop("rollout/repeated_prefix_share")
    assert metrics == {
        "rollout/samples_count": 4,
        "rollout/episodes_count": 4,
        "rollout/failed_count": 1,
        "rollout/reward_mean": 0.375,
        "rollout/reward_std": pytest.approx((((0.625**2) + 2 * 0.375**2 + 0.125**2) / 4) ** 0.5),
        "rollout/response_tokens_mean": 2.0,
        "rollout/response_tokens_max": 4.0,
        "rollout/truncated_share": 0.25,
        "rollout/accuracy": pytest.approx(1 / 3),  # of those with a verdict
        "rollout/weight_version_lag_max": 0.0,
        "rollout/weight_version_lag_mean": 0.0,
        "rollout/off_policy_share": 0.0,
    }
    assert shared == (3 + 2 + 3) / 20  # one prompt and two tokens of the first group, one prompt of the second


def test_an_episode_of_several_branches_fails_once():
    first, second, third, failed = samples_of_an_iteration()
    branches = [replace(failed, sample_id=name, episode_id="e") for name in ("3", "4")]
    metrics = rollout_metrics([first, second, third, *branches], 0)
    assert (metrics["rollout/failed_count"], metrics["rollout/episodes_count"]) == (1, 4)
    assert metrics["rollout/samples_count"] == 5


def test_prompts_of_a_group_need_not_be_alike():
    """Those of a conversation's branches differ, and what they begin with is repeated all the same."""
    first, second, *others = samples_of_an_iteration()
    longer = replace(second, prompt=replace(PROMPT, token_ids=(1, 2, 9)))
    equal = replace(second, prompt=replace(PROMPT, token_ids=tuple([1, 2, 3])))
    assert rollout_metrics([first, longer, *others], 0)["rollout/repeated_prefix_share"] == (2 + 3) / 20
    assert rollout_metrics([first, equal, *others], 0)["rollout/repeated_prefix_share"] == (3 + 2 + 3) / 20
    mixed = [replace(one, group_id="g") for one in (first, equal, longer)]
    assert rollout_metrics(mixed, 0)["rollout/repeated_prefix_share"] == (3 + 2 + 2) / (5 + 7 + 7)


def test_lags_are_those_of_tokens():
    first, second, *_ = samples_of_an_iteration()
    older = replace(second, versions=(VersionSpan(3, 1), VersionSpan(5, 3)))
    metrics = rollout_metrics([replace(first, versions=(VersionSpan(5, 2),)), older], 5)
    assert metrics["rollout/weight_version_lag_max"] == 2
    assert metrics["rollout/weight_version_lag_mean"] == 2 / 6
    assert metrics["rollout/off_policy_share"] == 1 / 6


def test_speed_of_generation_is_of_all_engines_and_of_each():
    samples = SampleTable.of([])
    batch = Batch(samples, grading_seconds=1.0, seconds=4.0, tokens=200, metrics={"rollout/groups_started_count": 3.0})
    assert generation_metrics(batch, ENGINES) == {
        "perf/rollout_seconds": 4.0,
        "perf/rollout_tokens_per_second": 50.0,
        "perf/rollout_idle_share": pytest.approx((0 + 0.75 + 1) / 3),
        "perf/rollout_engine_0_tokens_per_second": 40.0,
        "perf/rollout_engine_1_tokens_per_second": 40.0,
        "rollout/groups_started_count": 3.0,
    }
    assert "perf/rollout_idle_share" not in generation_metrics(batch, [])


def test_the_first_token_is_that_of_the_first_engine_that_has_one():
    late, soon, never = (
        replace(one, first_token_time=at) for one, at in zip(ENGINES, (130.0, 117.5, None), strict=True)
    )
    assert start_metrics([late, soon, never], 100.0) == {"perf/start_to_first_token_seconds": 17.5}
    assert start_metrics([never], 100.0) == start_metrics([], 100.0) == {}


def test_what_caches_saved_is_of_the_tokens_of_all_engines():
    usage = [replace(ENGINES[0], prompt_tokens=100, cached_tokens=60), replace(ENGINES[1], prompt_tokens=300)]
    counts = RoutingCounts(later_turns=7, moved_turns=2, moved_responses=3, read_tokens=50)
    assert cache_metrics(usage, counts) == {
        "rollout/prefix_hit_share": 0.15,
        "rollout/prefill_saved_tokens": 60.0,
        "rollout/turns_moved_count": 2.0,
        "rollout/responses_moved_count": 3.0,
        "rollout/moved_tokens": 50.0,
    }
    assert cache_metrics([], RoutingCounts())["rollout/prefix_hit_share"] == 0


def test_what_lost_engines_cost_is_in_every_row():
    nothing = fault_metrics({})
    assert set(nothing.values()) == {0.0} and len(nothing) == 5
    told = {"engine_restarts": 1, "requests_reissued": 2, "answers_refused": 3, "tokens_lost": 4, "healing_seconds": 5}
    assert list(fault_metrics(told).values()) == [1, 2, 3, 4, 5] and fault_metrics(told).keys() == nothing.keys()
    assert fault_metrics(told)["fault/lost_tokens"] == 4
