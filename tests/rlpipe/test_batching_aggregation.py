"""Loss weights by hand, and what they do with responses and groups that have no trained tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.batching import sequence_weights

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum_norm", "episode_mean", "group_mean")
TRAINED = np.array([3, 1, 0, 4, 0])
GROUPS = np.array([0, 0, 1, 1, 2])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 8, 1 / 8, 0, 1 / 8, 0]),
        ("sequence_mean", [1 / 9, 1 / 3, 0, 1 / 12, 0]),
        ("sequence_sum_norm", [1 / 30, 1 / 30, 0, 1 / 30, 0]),
        ("episode_mean", [1 / 8, 1 / 8, 0, 1 / 8, 0]),
        ("group_mean", [1 / 8, 1 / 8, 0, 1 / 8, 0]),
    ],
)
def test_weights_by_hand(aggregation, expected):
    episodes = np.array([0, 0, 1, 2, 3])
    assert sequence_weights(TRAINED, GROUPS, aggregation, 10, episodes) == pytest.approx(expected)


def test_group_mean_weighs_groups_alike_whatever_their_size():
    weights = sequence_weights(np.array([2, 2, 1]), np.array([0, 0, 1]), "group_mean", norm_tokens=10)
    assert weights == pytest.approx([1 / 8, 1 / 8, 1 / 2])


def test_episode_mean_is_sequence_mean_where_no_episode_has_several_branches():
    weights = sequence_weights(TRAINED, GROUPS, "episode_mean", norm_tokens=10)
    assert (weights == sequence_weights(TRAINED, GROUPS, "sequence_mean", norm_tokens=10)).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_step_without_trained_tokens_has_no_loss(aggregation):
    assert not sequence_weights(np.zeros(3, np.int64), np.arange(3), aggregation, norm_tokens=10).any()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "episode_mean", "group_mean"])
@given(rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=20))
def test_means_have_weights_that_add_up_to_one(aggregation, rows):
    trained = np.array([tokens for tokens, _ in rows])
    groups = np.unique([group for _, group in rows], return_inverse=True)[1]
    episodes = np.unique(groups * 2 + np.arange(len(groups)) % 2, return_inverse=True)[1]
    total = (sequence_weights(trained, groups, aggregation, 10, episodes) * trained).sum()
    assert total == pytest.approx(1.0 if trained.any() else 0.0)
