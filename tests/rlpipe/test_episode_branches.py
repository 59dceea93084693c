"""Episodes of several branches: one reward, one advantage, one weight in the loss, however many samples they have."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms import compute_advantages
from rlpipe.batching import PackLimits, pack_for_training
from rlpipe.batching.prefix_tree import repeated_prefix_tokens
from rlpipe.config.algorithm import ADVANTAGES, AlgorithmConfig, KLConfig, OverlongConfig
from rlpipe.generation.filters import truncated
from rlpipe.shared.errors import DataError
from rlpipe.shared.sample import Episode, Prompt, Reward, Sample, Status, VersionSpan, by_episode
from rlpipe.training.evaluation import score
from rlpipe.training.summaries import rollout_metrics

PLAIN = AlgorithmConfig(normalize_by_std=False)


def episode(name: str, group: str, reward: float, branches: int = 1, tokens: int = 3, shared: int = 1) -> Episode:
    """`branches` samples of `tokens` sampled tokens each; the last one alone trains the first `shared` of them."""
    samples = []
    for index in range(branches):
        repeated = shared if index < branches - 1 else 0
        samples.append(
            Sample(
                sample_id=name if branches == 1 else f"{name}.{index}",
                group_id=group,
                prompt=Prompt(group, "", (1, 2), "", "test"),
                response_ids=(3,) * tokens,
                response_text="",
                rollout_logprobs=(-1.0,) * tokens,
                loss_mask=(0,) * repeated + (1,) * (tokens - repeated),
                versions=(VersionSpan(0, tokens),),
                status=Status.COMPLETED,
                engine=0,
                reward=Reward(reward, reward > 0, ""),
                episode_id="" if branches == 1 else name,
                shared_tokens=repeated,
            )
        )
    return tuple(samples)


def flat(*episodes: Episode) -> list[Sample]:
    return [sample for one in episodes for sample in one]


def advantages(samples: list[Sample], config: AlgorithmConfig = PLAIN, **arguments) -> dict[str, float]:
    result = compute_advantages(samples, config, max_response_tokens=100, **arguments)
    return {sample.sample_id: sample.advantage for sample in result.samples}


def config_of(name: str) -> AlgorithmConfig:
    return AlgorithmConfig(
        advantage=name, aggregation="sequence_sum_norm" if name == "dr_grpo" else "episode_mean", loss="ppo_clip"
    )


def test_an_episode_counts_once_in_its_group_whatever_the_number_of_its_branches():
    samples = flat(episode("a", "g", 1.0, branches=5), episode("b", "g", 0.0), episode("c", "g", 0.5))
    assert advantages(samples) == {**{f"a.{i}": 0.5 for i in range(5)}, "b": -0.5, "c": 0.0}
    counts = compute_advantages(samples, PLAIN, max_response_tokens=100).counts
    assert (counts.samples, counts.episodes, counts.groups, counts.singleton_groups) == (7, 3, 1, 0)
    assert counts.advantage_abs_mean == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if not name.startswith("turn_")])
@given(branches=st.lists(st.integers(1, 4), min_size=4, max_size=4), scores=st.lists(st.integers(0, 3), min_size=4))
def test_every_advantage_of_an_episode_is_that_of_one_sample_with_all_its_trained_tokens(name, branches, scores):
    whole, split = [], []
    for index, (count, reward) in enumerate(zip(branches, scores, strict=False)):
        parts = episode(f"e{index}", f"g{index // 2}", float(reward), count)
        trained = sum(sample.trained_tokens for sample in parts)
        whole += episode(f"e{index}", f"g{index // 2}", float(reward), tokens=trained)
        split += parts
    expected = advantages(whole, config_of(name))
    for sample_id, value in advantages(split, config_of(name)).items():
        assert value == pytest.approx(expected[sample_id.partition(".")[0]], abs=1e-12)


def test_token_returns_run_through_the_branches_one_after_another():
    kl = KLConfig(coefficient=1.0, placement="reward", estimator="k1")
    config = AlgorithmConfig(advantage="reinforce_plus_plus", kl=kl)
    samples = flat(episode("a", "g", 1.0, branches=2, tokens=2), episode("b", "g", 0.0, tokens=1))
    penalties = {"a.0": np.array([9.0, 0.25]), "a.1": np.array([0.5, 0.125]), "b": np.array([0.5])}
    result = compute_advantages(samples, config, max_response_tokens=9, kl_by_sample=penalties).samples
    returns = np.array([1 - 0.875, 1 - 0.625, 1 - 0.125, -0.5])  # of trained tokens: the first of a.0 is shared
    expected = (returns - returns.mean()) / (returns.std() + 1e-6)
    found = [np.array(sample.token_advantages)[np.array(sample.loss_mask) == 1] for sample in result]
    assert np.concatenate(found) == pytest.approx(expected)
    assert [len(sample.token_advantages) for sample in result] == [2, 2, 1]


def test_an_episode_of_which_a_part_was_cut_off_is_truncated_as_a_whole():
    first, last = episode("a", "g", 1.0, branches=2)
    cut = (replace(first, status=Status.TRUNCATED), last)
    config = PLAIN.model_copy(update={"overlong": OverlongConfig(mask_truncated=True)})
    result = compute_advantages(flat(cut, episode("b", "g", 0.0)), config, max_response_tokens=100)
    assert [sample.trained_tokens for sample in result.samples] == [0, 0, 3]
    assert result.counts.truncated_masked == 1
    assert truncated(cut) == "truncated" and truncated(flat(cut, episode("b", "g", 0.0))) is None


def test_the_length_of_an_episode_is_that_of_its_longest_branch():
    overlong = OverlongConfig(buffer_tokens=4, penalty=0.5)
    config = PLAIN.model_copy(update={"overlong": overlong, "advantage": "dr_grpo"})
    (first, *_), (_, last) = episode("a", "g", 1.0, branches=2, tokens=9), episode("a", "g", 1.0, branches=2, tokens=2)
    result = compute_advantages([first, last, *episode("b", "g", 1.0)], config, max_response_tokens=10)
    assert [sample.advantage for sample in result.samples] == pytest.approx([-0.1875, -0.1875, 0.1875])  # 0.5 x 3 / 4
    assert result.counts.overlong_penalized == 1


def test_branches_of_different_rewards_are_refused():
    first, last = episode("a", "g", 1.0, branches=2)
    with pytest.raises(DataError, match=r"episode a have the scores \[0.5, 1.0\]"):
        advantages([replace(first, reward=Reward(0.5, None, "")), last])


def test_the_lag_of_older_weights_counts_by_tokens():
    (first,), (second,) = episode("a", "g", 1.0, tokens=5), episode("b", "g", 0.0, tokens=3)
    spans = (VersionSpan(2, 1), VersionSpan(4, 4))
    metrics = rollout_metrics([replace(first, versions=spans), replace(second, versions=(VersionSpan(5, 3),))], 5)
    assert metrics["rollout/weight_version_lag_max"] == 3
    assert metrics["rollout/weight_version_lag_mean"] == (3 * 1 + 1 * 4) / 8
    assert metrics["rollout/off_policy_share"] == 5 / 8


@given(
    branches=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    budget=st.integers(8, 60),
    ranks=st.integers(1, 3),
)
def test_each_episode_weighs_the_same_in_the_loss_however_it_is_split(branches, budget, ranks):
    samples = flat(*(episode(f"e{index}", "g", float(index), count) for index, count in enumerate(branches)))
    trained = compute_advantages(samples, config_of("grpo"), max_response_tokens=100).samples
    packs = pack_for_training(
        trained, PackLimits(budget), data_parallel=ranks, aggregation="episode_mean", norm_tokens=1
    )
    weights: dict[str, float] = defaultdict(float)
    for pack in (pack.laid_out() for rank in packs.ranks for step in rank for pack in step):
        ends = zip(pack.sample_ids, pack.cu_seqlens_padded, pack.cu_seqlens_padded[1:], strict=False)
        for sample_id, start, end in ends:
            weights[sample_id.partition(".")[0]] += float(pack.loss_weights[start:end].sum())
    assert weights == pytest.approx({f"e{index}": 1 / len(branches) for index in range(len(branches))})


def test_metrics_count_episodes_and_tell_of_branches():
    samples = flat(episode("a", "g", 1.0, branches=3), episode("b", "g", 0.0), episode("c", "h", 1.0, branches=2))
    metrics = rollout_metrics(samples, 0)
    assert (metrics["rollout/samples_count"], metrics["rollout/episodes_count"]) == (6, 3)
    assert metrics["rollout/reward_mean"] == metrics["rollout/accuracy"] == pytest.approx(2 / 3)
    assert (metrics["rollout/branches_mean"], metrics["rollout/branches_max"]) == (2, 3)
    assert metrics["rollout/shared_tokens"] == 3
    assert metrics["rollout/repeated_branch_share"] == 3 * 5 / 30  # all six are the same five tokens
    assert metrics["rollout/repeated_prefix_share"] == 4 * 5 / 30
    assert "rollout/branches_mean" not in rollout_metrics(list(episode("b", "g", 0.0)), 0)
    assert score(samples) == {"accuracy": 2 / 3, "reward_mean": 2 / 3, "response_tokens_mean": 3.0}
    assert [one[0].episode for one in by_episode(reversed(samples))] == ["c", "b", "a"]


@given(
    prompts=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    sequences=st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), max_size=5)), max_size=8),
)
def test_repeated_prefixes_are_what_a_tree_holds_once(prompts, sequences):
    made = [(index,) + (7,) * prompts[index % len(prompts)] + tuple(rest) for index, rest in sequences]
    nodes = {tokens[:end] for tokens in made for end in range(1, len(tokens) + 1)}
    assert repeated_prefix_tokens(made) == sum(map(len, made)) - len(nodes)


def test_an_episode_that_failed_counts_once_whatever_the_number_of_its_branches():
    failed = [replace(one, status=Status.FAILED, reward=None) for one in episode("a", "g", 1.0, branches=3)]
    samples = [*failed, *flat(episode("b", "g", 0.0, branches=2), episode("c", "g", 1.0))]
    assert compute_advantages(samples, PLAIN, max_response_tokens=100).counts.failed_samples == 1


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_an_episode_is_truncated_whichever_of_its_branches_is(cut):
    branches = [
        replace(one, status=Status.TRUNCATED if place == cut else Status.COMPLETED)
        for place, one in enumerate(episode("a", "g", 1.0, branches=3))
    ]
    config = PLAIN.model_copy(update={"overlong": OverlongConfig(mask_truncated=True)})
    result = compute_advantages([*branches, *episode("b", "g", 0.0)], config, max_response_tokens=100)
    assert [sample.trained_tokens for sample in result.samples] == [0, 0, 0, 3]
