"""Advantages against hand-computed cases; groups that are uneven, single or all equal; reward shaping."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms import compute_advantages, kl_by_sample_of, mask_off_policy
from rlpipe.algorithms.shaping import overlong_penalty
from rlpipe.config.algorithm import AlgorithmConfig, KLConfig, OverlongConfig
from rlpipe.shared.errors import ConfigError, DataError
from rlpipe.shared.kl import kl_estimate
from rlpipe.shared.sample import Prompt, Reward, Sample, Status, VersionSpan
from rlpipe.training.summaries import rollout_metrics


def graded(number: int, group: str, score: float, tokens: int = 2, status=Status.COMPLETED, mask=None) -> Sample:
    return Sample(
        sample_id=str(number),
        group_id=group,
        prompt=Prompt(group, "", (1, 2), "", "test"),
        response_ids=(3,) * tokens,
        response_text="",
        rollout_logprobs=(-1.0,) * tokens,
        loss_mask=tuple(mask) if mask is not None else (1,) * tokens,
        versions=(VersionSpan(0, tokens),),
        status=status,
        engine=0,
        reward=Reward(score, None, ""),
    )


def test_no_count_is_told_by_what_was_generated_too():
    """Of two metrics of one name in a row the later one would stand."""
    samples = batch_of((1, 0), (1, 1))
    counted = compute_advantages(samples, AlgorithmConfig(), max_response_tokens=100).counts.metrics
    assert counted["rollout/equal_reward_groups_count"] == 1
    assert not counted.keys() & rollout_metrics(samples, 0).keys()


def batch_of(*groups: tuple[float, ...]) -> list[Sample]:
    pairs = [(f"g{i}", score) for i, scores in enumerate(groups) for score in scores]
    return [graded(n, group, score) for n, (group, score) in enumerate(pairs)]


def advantages_of(samples: list[Sample], config: AlgorithmConfig, **arguments) -> list[float]:
    result = compute_advantages(samples, config, max_response_tokens=100, **arguments)
    return [sample.advantage for sample in result.samples]


HALF = math.sqrt(1 / 3)  # unbiased standard deviation of (1, 0, 0, 1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AlgorithmConfig(advantage="grpo"), [0.5 / HALF, -0.5 / HALF, -0.5 / HALF, 0.5 / HALF, 0, 0, 0, 0]),
        (AlgorithmConfig(advantage="grpo", normalize_by_std=False), [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]),
        (AlgorithmConfig(advantage="dr_grpo", aggregation="sequence_sum_norm"), [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]),
        (AlgorithmConfig(advantage="rloo"), [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0, 0, 0, 0]),
    ],
)
def test_group_advantages_by_hand_with_an_equal_group_and_a_group_of_one(config, expected):
    samples = batch_of((1, 0, 0, 1), (0.1, 0.1), (7,), (8,))
    assert advantages_of(samples, config) == pytest.approx(expected, abs=1e-5)
    metrics = compute_advantages(samples, config, max_response_tokens=100).counts.metrics
    counts = {"groups": 4, "singleton_groups": 2, "short_groups": 3}
    assert metrics.pop("rollout/equal_reward_groups_count") == 1
    assert {name: metrics.pop(f"advantage/{name}_count") for name in counts} == counts
    assert metrics.pop("advantage/abs_mean") == pytest.approx(np.abs(expected).mean(), abs=1e-5)
    assert set(metrics.values()) == {0}


def test_the_spread_of_two_is_that_of_their_difference():
    """Unbiased: (1, 0) has the variance 1 / 2."""
    assert advantages_of(batch_of((1, 0), (4, 8)), AlgorithmConfig()) == pytest.approx(
        [math.sqrt(0.5), -math.sqrt(0.5), -math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5
    )


def test_equal_scores_give_exactly_zero_whatever_rounding_does():
    assert advantages_of(batch_of((0.1,) * 3, (0.7,) * 7), AlgorithmConfig()) == [0.0] * 10


def test_rloo_is_the_score_less_the_mean_of_the_others():
    scores = (3.0, 1.0, 2.0)
    expected = [3 - 1.5, 1 - 2.5, 2 - 2.0]
    assert advantages_of(batch_of(scores), AlgorithmConfig(advantage="rloo")) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(groups=st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=6), min_size=1, max_size=5))
def test_a_group_never_sees_another_one(name, groups):
    config = AlgorithmConfig(
        advantage=name, aggregation="sequence_sum_norm" if name == "dr_grpo" else "token_mean", loss="ppo_clip"
    )
    together = advantages_of(batch_of(*groups), config)
    alone = [value for group in groups for value in advantages_of(batch_of(group), config)]
    assert together == pytest.approx(alone, abs=1e-9)
    start = 0
    for group in groups:
        assert sum(together[start : start + len(group)]) == pytest.approx(0, abs=1e-9)
        start += len(group)


def test_a_failed_sample_is_left_out_and_its_group_goes_on():
    samples = batch_of((1, 0, 0), (1, 0))
    samples[2] = replace(samples[2], status=Status.FAILED, reward=None, response_ids=())
    result = compute_advantages(
        samples, AlgorithmConfig(advantage="grpo", normalize_by_std=False), max_response_tokens=9
    )
    assert [s.advantage for s in result.samples] == [0.5, -0.5, 0.5, -0.5]
    assert result.counts.failed_samples == 1
    assert result.counts.metrics["advantage/failed_samples_count"] == 1
    with pytest.raises(DataError, match="all failed"):
        compute_advantages([samples[2]], AlgorithmConfig(), max_response_tokens=9)


def test_groups_need_not_be_contiguous():
    samples = [graded(0, "a", 1), graded(1, "b", 5), graded(2, "a", 0), graded(3, "b", 7)]
    config = AlgorithmConfig(normalize_by_std=False)
    assert advantages_of(samples, config) == [0.5, -1, -0.5, 1]


def test_reinforce_plus_plus_whitens_over_trained_tokens():
    samples = [graded(0, "a", 1.0, tokens=3), graded(1, "a", 0.0, tokens=1)]
    deviation = math.sqrt(3 / 16)
    expected = [0.25 / deviation, -0.75 / deviation]
    assert advantages_of(samples, AlgorithmConfig(advantage="reinforce_plus_plus")) == pytest.approx(expected, abs=1e-5)
    baseline = AlgorithmConfig(advantage="reinforce_plus_plus_baseline")
    centred = np.array([0.5, -0.5])
    mean = (3 * 0.5 - 0.5) / 4
    whitened = (centred - mean) / math.sqrt((3 * (0.5 - mean) ** 2 + (-0.5 - mean) ** 2) / 4)
    assert advantages_of(samples, baseline) == pytest.approx(whitened, abs=1e-5)
    assert advantages_of(batch_of((1, 1), (1,)), baseline) == [0, 0, 0]


def test_kl_in_the_reward_lowers_the_score_of_a_response():
    kl = KLConfig(coefficient=0.5, placement="reward", estimator="k1")
    config = AlgorithmConfig(kl=kl, normalize_by_std=False)
    samples = [graded(0, "a", 1.0, mask=(1, 0)), graded(1, "a", 1.0)]
    tokens = {"0": np.array([0.4, 9.0]), "1": np.array([0.0, 0.0])}
    result = compute_advantages(samples, config, max_response_tokens=9, kl_by_sample=tokens)
    assert [s.advantage for s in result.samples] == pytest.approx([-0.1, 0.1])
    assert result.counts.kl_penalty_mean == pytest.approx(0.05)
    assert result.counts.equal_reward_groups == 0
    with pytest.raises(DataError, match="no KL was given"):
        compute_advantages(samples, config, max_response_tokens=9)
    with pytest.raises(DataError, match="the first is 1"):
        compute_advantages(samples, config, max_response_tokens=9, kl_by_sample={"0": tokens["0"]})


def test_the_kl_of_a_response_is_that_of_the_tokens_that_predict_it():
    samples = [replace(graded(0, "a", 1.0), rollout_logprobs=(-1.0, -3.0)), graded(1, "a", 0.0, tokens=1)]
    reference = {"0": np.array([7, -1.5, -1, 7], np.float32), "1": np.array([7, -2, 7], np.float32)}
    by_engine = kl_by_sample_of(samples, None, reference, "k1")
    assert {name: list(kl) for name, kl in by_engine.items()} == {"0": [0.5, -2.0], "1": [1.0]}
    policy = {"0": np.array([9, -1, -1, 9], np.float32), "1": np.array([9, -1, 9], np.float32)}
    by_actor = kl_by_sample_of(samples, policy, reference, "k1")
    assert {name: list(kl) for name, kl in by_actor.items()} == {"0": [0.5, 0.0], "1": [1.0]}


def test_tokens_of_other_weights_lose_their_loss_where_that_is_asked_for():
    spans = (VersionSpan(3, 1), VersionSpan(4, 2), VersionSpan(5, 1))
    sample = replace(graded(0, "a", 1.0, tokens=4, mask=(1, 0, 1, 1)), versions=spans)
    assert mask_off_policy(sample, 4).loss_mask == (0, 0, 1, 0)
    assert mask_off_policy(sample, 5).loss_mask == (0, 0, 0, 1)
    assert mask_off_policy(sample, 6).loss_mask == (0, 0, 0, 0)


def test_reinforce_plus_plus_has_token_returns_with_kl_in_the_reward():
    kl = KLConfig(coefficient=1.0, placement="reward", estimator="k1")
    config = AlgorithmConfig(advantage="reinforce_plus_plus", kl=kl)
    samples = [graded(0, "a", 1.0, mask=(1, 1)), graded(1, "a", 0.0, mask=(1, 0)), graded(2, "a", 2.0)]
    tokens = {"0": np.array([0.25, 0.5]), "1": np.array([0.5, 3.0]), "2": np.array([1.0, 0.25])}
    # 1 - 0.75, 1 - 0.5, 0 - 0.5, 2 - 1.25, 2 - 0.25; the untrained token has no penalty.
    returns = np.array([0.25, 0.5, -0.5, 0.75, 1.75])
    expected = (returns - returns.mean()) / returns.std()
    first, second, third = compute_advantages(samples, config, max_response_tokens=9, kl_by_sample=tokens).samples
    assert first.token_advantages == pytest.approx(expected[:2], abs=1e-5)
    assert second.token_advantages[0] == pytest.approx(expected[2], abs=1e-5)
    assert third.token_advantages == pytest.approx(expected[3:], abs=1e-5)


def test_kl_estimators_by_hand():
    policy, reference = np.array([-1.0], np.float32), np.array([-1.5], np.float32)
    assert kl_estimate(policy - reference, "k1", np.expm1) == pytest.approx(0.5)
    assert kl_estimate(policy - reference, "k2", np.expm1) == pytest.approx(0.125)
    assert kl_estimate(policy - reference, "k3", np.expm1) == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def test_soft_overlong_punishment():
    assert [overlong_penalty(n, 100, 20) for n in (10, 80, 90, 100, 130)] == [0, 0, -0.5, -1, -1]
    assert overlong_penalty(100, 100, 0) == 0
    config = AlgorithmConfig(overlong=OverlongConfig(buffer_tokens=20, penalty=0.5), normalize_by_std=False)
    samples = [graded(0, "a", 1.0, tokens=100), graded(1, "a", 1.0, tokens=50)]
    result = compute_advantages(samples, config, max_response_tokens=100)
    assert [s.advantage for s in result.samples] == pytest.approx([-0.25, 0.25])
    assert result.counts.overlong_penalized == 1


def test_overlong_filtering_masks_the_loss_but_keeps_the_score():
    config = AlgorithmConfig(overlong=OverlongConfig(mask_truncated=True), normalize_by_std=False)
    samples = [graded(0, "a", 0.0, status=Status.TRUNCATED), graded(1, "a", 1.0)]
    result = compute_advantages(samples, config, max_response_tokens=9)
    assert [s.trained_tokens for s in result.samples] == [0, 2]
    assert [s.advantage for s in result.samples] == [-0.5, 0.5]
    assert result.counts.truncated_masked == 1


def test_rewards_must_be_there_and_finite():
    for reward in (None, Reward(float("nan"), None, "")):
        with pytest.raises(DataError, match="sample 0 has the reward"):
            advantages_of([replace(graded(0, "a", 0.0), reward=reward)], AlgorithmConfig())


def test_an_unknown_name_is_refused_with_the_known_ones():
    config = AlgorithmConfig.model_construct(**{**AlgorithmConfig().__dict__, "advantage": "grop"})
    with pytest.raises(ConfigError, match="'grop' is unknown: use one of dr_grpo, grpo"):
        advantages_of(batch_of((1, 0)), config)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_kl_in_the_reward_is_a_lower_score_whatever_the_advantage(name):
    aggregation = "sequence_sum_norm" if name == "dr_grpo" else "token_mean"
    plain = AlgorithmConfig(advantage=name, aggregation=aggregation)
    kl = plain.model_copy(update={"kl": KLConfig(coefficient=0.5, placement="reward", estimator="k1")})
    samples = batch_of((1, 0, 2), (3, 3))
    tokens = {one.sample_id: np.full(2, 0.1 * index**2) for index, one in enumerate(samples)}
    lower = [replace(one, reward=Reward(one.reward.score - 0.1 * i**2, None, "")) for i, one in enumerate(samples)]
    assert advantages_of(samples, kl, kl_by_sample=tokens) == pytest.approx(advantages_of(lower, plain))


@pytest.mark.parametrize(("estimator", "wanted"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_the_kl_in_the_reward_is_that_of_the_estimator_that_is_set(estimator, wanted):
    reference = {"0": np.array([7, -1.5, 7], np.float32)}
    found = kl_by_sample_of([graded(0, "a", 1.0, tokens=1)], None, reference, estimator)
    assert found["0"] == pytest.approx([wanted])
