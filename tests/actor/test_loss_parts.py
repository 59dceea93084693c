"""The parts that losses are made of, against hand-computed numbers."""

import sys

import pytest
import torch

from actor.losses.loss_registry import find_loss
from actor.losses.objective import objective
from actor.losses.types import LossInputs, LossOutput
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.kl import kl_estimate


def two_sequences() -> LossInputs:
    """Sequences of 3 and 2 tokens; the second token of the first one is not trained."""
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    return LossInputs(
        logprobs=torch.tensor([-1.0, 0.0, -3.0, -0.5, -1.5], requires_grad=True),
        mask=mask,
        weights=mask / 4,
        advantages=torch.tensor([2.0, 0.0, 2.0, -1.0, -1.0]),
        rollout_logprobs=torch.tensor([-1.5, 0.0, -3.0, -0.5, -1.25]),
        sequence_ids=torch.tensor([0, 0, 0, 1, 1]),
        sequences=3,
        entropy=torch.tensor([1.0, 0.0, 2.0, 3.0, 2.0]),
    )


def test_sums_and_means_per_sequence_leave_out_masked_tokens():
    inputs = two_sequences()
    values = torch.tensor([1.0, 100.0, 3.0, 5.0, 6.0])
    assert inputs.sequence_sum(values).tolist() == [4.0, 11.0, 0.0]
    assert inputs.sequence_mean(values).tolist() == [2.0, 5.5, 0.0]
    assert inputs.to_tokens(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]


def test_supervised_loss_is_the_negative_log_probability():
    output = objective(two_sequences(), AlgorithmConfig(loss="sft"))
    assert output.token_loss.tolist() == [1.0, 0.0, 3.0, 0.5, 1.5]
    assert {name: value.item() for name, value in output.totals.items()} == {"train/loss": 1.5}
    assert not output.means and not output.maxima


def test_on_policy_step_reports_the_engine_mismatch_and_the_entropy():
    output = objective(two_sequences(), AlgorithmConfig())
    assert output.totals["train/loss"].item() == pytest.approx(-(2 + 2 - 1 - 1) / 4)
    sums = {name: (total.item(), count.item()) for name, (total, count) in output.means.items()}
    assert sums["mismatch/logprob_abs_mean"] == (0.75, 4.0)
    assert sums["train/entropy"] == (8.0, 4.0)
    assert sums["train/ratio_mean"] == (4.0, 4.0)
    assert sums["train/clip_share"] == (0.0, 4.0)
    assert output.maxima["mismatch/logprob_abs_max"].item() == 0.5


@pytest.mark.parametrize(("estimator", "wanted"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.10653066)])
def test_kl_estimators(estimator, wanted):
    assert kl_estimate(torch.tensor(0.5), estimator, torch.expm1).item() == pytest.approx(wanted)
    assert kl_estimate(torch.tensor(0.0), estimator, torch.expm1).item() == 0


def test_unknown_loss_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'no_such_loss'.*ppo_clip.*sft"):
        find_loss("no_such_loss")


def weighted_negative(inputs, options):
    return LossOutput(token_loss=-2 * inputs.advantages * inputs.logprobs)


def test_a_loss_of_ones_own_is_named_by_its_path():
    options = AlgorithmConfig(loss="test_loss_parts:weighted_negative")
    assert find_loss(options.loss) is sys.modules["test_loss_parts"].weighted_negative
    with pytest.raises(ConfigError, match=r"'test_loss_parts:no_such'.*has no 'no_such'"):
        find_loss("test_loss_parts:no_such")
