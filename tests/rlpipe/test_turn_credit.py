"""Turn-level advantages by hand: returns, leave-one-out by turn, uneven numbers of turns, several agents."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms import compute, compute_advantages
from rlpipe.config.algorithm import AlgorithmConfig, KLConfig
from rlpipe.shared.sample import Prompt, Reward, Sample, Status, VersionSpan
from rlpipe.shared.turn import Turn

TURN_TOKENS = 2


def episode(number: int, group: str, rewards: tuple[float | None, ...], outcome: float = 0.0, agents=None) -> Sample:
    """One turn for each reward, and after each as many tokens of the environment."""
    turns = tuple(
        Turn(2 * TURN_TOKENS * place, 2 * TURN_TOKENS * place + TURN_TOKENS, place, reward, agent=agent)
        for place, (reward, agent) in enumerate(zip(rewards, agents or [""] * len(rewards), strict=True))
    )
    tokens = 2 * TURN_TOKENS * len(rewards)
    return Sample(
        sample_id=str(number),
        group_id=group,
        prompt=Prompt(group, "", (1, 2), "", "test"),
        response_ids=(3,) * tokens,
        response_text="",
        rollout_logprobs=(-1.0,) * tokens,
        loss_mask=((1,) * TURN_TOKENS + (0,) * TURN_TOKENS) * len(rewards),
        versions=(VersionSpan(0, tokens),),
        status=Status.COMPLETED,
        engine=0,
        reward=Reward(outcome + sum(reward or 0.0 for reward in rewards), None, ""),
        turns=turns,
    )


def turn_advantages(samples, **settings) -> list[list[float]]:
    config = AlgorithmConfig(**{"advantage": "turn_rloo"} | settings)
    result = compute_advantages(samples, config, max_response_tokens=100)
    found = []
    for sample in result.samples:
        values = np.array(sample.token_advantages).reshape(-1, 2, TURN_TOKENS)
        assert np.ptp(values[:, 0], axis=1).max() == 0  # all tokens of a turn have its advantage
        assert not values[:, 1].any()  # and those of the environment have none
        found.append(values[:, 0, 0].tolist())
    return found


def test_returns_are_discounted_and_the_outcome_belongs_to_the_last_turn():
    samples = [episode(0, "g", (1.0, None, 2.0), outcome=4.0), episode(1, "g", (0.0, 0.0, 0.0))]
    # From the third turn on 2 + 4; from the second 0 + 6 / 2; from the first 1 + 3 / 2. The other's returns are 0.
    assert turn_advantages(samples, turn_discount=0.5) == [[2.5, 3.0, 6.0], [-2.5, -3.0, -6.0]]
    assert turn_advantages(samples, turn_discount=0.0) == [[1.0, 0.0, 6.0], [-1.0, 0.0, -6.0]]
    assert turn_advantages(samples[::-1], turn_discount=0.5) == [[-2.5, -3.0, -6.0], [2.5, 3.0, 6.0]]


def test_a_turn_is_compared_with_the_others_that_get_so_far_and_alone_it_teaches_nothing():
    samples = [episode(0, "g", (1.0, 3.0, 5.0, 7.0)), episode(1, "g", (2.0, 1.0)), episode(2, "g", (6.0,))]
    samples.append(episode(3, "h", (9.0,)))
    # Without discount: leave-one-out means of the first turn are 4, 3.5 and 1.5; of the second 1 and 3.
    assert turn_advantages(samples, turn_discount=0.0) == [[-3.0, 2.0, 0.0, 0.0], [-1.5, -2.0], [4.5], [0.0]]
    result = compute_advantages(samples, AlgorithmConfig(advantage="turn_rloo"), max_response_tokens=9)
    assert result.counts.metrics["advantage/lone_turns_count"] == 3


def test_normalized_turns_have_the_groups_spread_of_their_place():
    samples = [episode(n, "g", (float(n % 2), 10.0 * (n % 2))) for n in range(4)]
    first, second = (
        [turns[place] for turns in turn_advantages(samples, advantage="turn_grpo", turn_discount=0.0)]
        for place in (0, 1)
    )
    assert first == pytest.approx([-0.866, 0.866] * 2, abs=1e-3)
    assert second == pytest.approx(first, abs=1e-4)
    plain = turn_advantages(samples, advantage="turn_grpo", turn_discount=0.0, normalize_by_std=False)
    assert plain == [[-0.5, -5.0], [0.5, 5.0]] * 2


def test_two_turns_are_spread_by_their_difference_and_equal_ones_teach_nothing_whatever_rounding_does():
    two = [episode(n, "g", (float(n),)) for n in range(2)]
    half = pytest.approx(np.sqrt(0.5), abs=1e-5)
    (first,), (second,) = turn_advantages(two, advantage="turn_grpo")
    assert (-first, second) == (half, half)
    (first,), (second,) = turn_advantages(two, advantage="turn_grpo", normalize_by_std=False)
    assert (first, second) == (-0.5, 0.5)
    equal = [episode(n, "g", (0.1,)) for n in range(3)]  # 0.3 / 3 is not 0.1
    for name in ("turn_grpo", "turn_rloo"):
        assert turn_advantages(equal, advantage=name) == [[0.0]] * 3


def test_agents_answer_for_their_own_rewards_and_are_compared_with_themselves():
    samples = [
        episode(0, "g", (1.0, -1.0, 2.0), agents=["red", "blue", "red"]),
        episode(1, "g", (0.0, 0.0, 0.0), agents=["blue", "red", "red"]),
    ]
    # Red of the first episode returns 3 and 2, of the second 0 and 0; blue returns -1 and 0.
    assert turn_advantages(samples) == [[3.0, -1.0, 2.0], [1.0, -3.0, -2.0]]


def test_a_response_without_turns_is_one_turn():
    samples = [replace(episode(n, "g", (None,), outcome=float(n)), turns=()) for n in range(2)]
    result = compute_advantages(samples, AlgorithmConfig(advantage="turn_rloo"), max_response_tokens=9)
    assert [sample.advantage for sample in result.samples] == [-1.0, 1.0]


def test_turns_are_looked_for_once_and_only_by_functions_that_ask(monkeypatch):
    looked = []
    table = compute.turn_table
    monkeypatch.setattr(compute, "turn_table", lambda *arguments: looked.append(1) or table(*arguments))
    samples = [episode(n, "g", (None, float(n)), outcome=float(n)) for n in range(2)]
    for advantage, times in (("grpo", 0), ("rloo", 0), ("turn_grpo", 1), ("turn_rloo", 2)):
        compute_advantages(samples, AlgorithmConfig(advantage=advantage), max_response_tokens=100)
        assert len(looked) == times, advantage


def test_a_turn_in_several_branches_counts_once_and_has_its_advantage_in_each():
    whole = episode(0, "g", (1.0, 5.0))
    later = replace(
        whole,
        sample_id="0.b",
        episode_id="0",
        turns=(whole.turns[0], replace(whole.turns[1], number=2, reward=2.0)),
        reward=Reward(8.0, None, ""),
        loss_mask=(0,) * 4 + (1, 1, 0, 0),
    )
    whole = replace(whole, episode_id="0", reward=Reward(8.0, None, ""))
    samples = [whole, later, episode(1, "g", (0.0, 0.0, 0.0))]
    assert turn_advantages(samples, turn_discount=0.0) == [[1.0, 5.0], [1.0, 2.0], [-1.0, -5.0, -2.0]]
    last = replace(later, sample_id="0.c", turns=(later.turns[0], replace(later.turns[1], number=3, reward=7.0)))
    samples = [replace(one, reward=Reward(15.0, None, "")) for one in (whole, later, last)]
    samples.append(episode(1, "g", (0.0, 0.0, 0.0, 0.0)))
    expected = [[1.0, 5.0], [1.0, 2.0], [1.0, 7.0], [-1.0, -5.0, -2.0, -7.0]]
    assert turn_advantages(samples, turn_discount=0.0) == expected


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=4), min_size=2, max_size=5))
def test_with_an_outcome_alone_every_turn_has_the_episodes_rloo_advantage_where_all_turns_are_as_many(rewards):
    turns = min(map(len, rewards))
    samples = [episode(n, "g", (None,) * turns, outcome=scores[0]) for n, scores in enumerate(rewards)]
    rloo = compute_advantages(samples, AlgorithmConfig(advantage="rloo"), max_response_tokens=9).samples
    for found, sample in zip(turn_advantages(samples), rloo, strict=True):
        assert found == pytest.approx([sample.advantage] * turns, abs=1e-9)


def test_a_token_penalty_counts_to_the_last_turn_with_the_outcome():
    samples = [episode(0, "g", (1.0, 1.0)), episode(1, "g", (1.0, 1.0))]
    kl = {"0": np.ones(8), "1": np.zeros(8)}
    config = AlgorithmConfig(
        advantage="turn_rloo", turn_discount=0.0, kl=KLConfig(coefficient=0.5, estimator="k1", placement="reward")
    )
    result = compute_advantages(samples, config, max_response_tokens=9, kl_by_sample=kl)
    # Four trained tokens at half a penalty each.
    assert result.samples[0].token_advantages == (0, 0, 0, 0, -2, -2, 0, 0)
