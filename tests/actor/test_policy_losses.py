"""Policy losses and the mismatch correction against cases worked out by hand."""

import math

import pytest
import torch

from actor.losses.correction import correct_mismatch
from actor.losses.loss_registry import find_loss
from actor.losses.objective import objective
from actor.losses.types import LossInputs, LossOutput
from rlpipe.config.algorithm import AlgorithmConfig, CorrectionConfig, KLConfig


def inputs_of(ratios, advantages, *, mask=None, sequence_ids=None, rollout_ratios=None) -> LossInputs:
    """Old log-probs are -1; `ratios` are new over old, `rollout_ratios` old over rollout."""
    ratio = torch.tensor(ratios, dtype=torch.float64)
    mask = torch.ones_like(ratio) if mask is None else torch.tensor(mask, dtype=torch.float64)
    ids = torch.tensor(sequence_ids if sequence_ids is not None else [0] * len(ratios))
    rollout = torch.ones_like(ratio) if rollout_ratios is None else torch.tensor(rollout_ratios, dtype=torch.float64)
    old = -torch.ones_like(ratio)
    return LossInputs(
        logprobs=((old + ratio.log()) * mask).requires_grad_(),
        mask=mask,
        weights=mask / mask.sum(),
        advantages=torch.tensor(advantages, dtype=torch.float64) * mask,
        rollout_logprobs=(old - rollout.log()) * mask,
        sequence_ids=ids,
        sequences=int(ids.max()) + 1,
        old_logprobs=old * mask,
    )


def gradient(output: LossOutput, inputs: LossInputs) -> list[float]:
    output.token_loss.sum().backward()
    return inputs.logprobs.grad.tolist()


def test_ppo_clip_with_clip_higher():
    inputs = inputs_of([1.1, 1.5, 0.5, 1.5, 0.5], [1, 1, 1, -1, -1])
    output = find_loss("ppo_clip")(inputs, AlgorithmConfig(clip_low=0.3, clip_high=0.28))
    assert output.token_loss.tolist() == pytest.approx([-1.1, -1.28, -0.5, 1.5, 0.7])
    assert gradient(output, inputs) == pytest.approx([-1.1, 0, -0.5, 1.5, 0])


def test_dual_clip_bounds_only_negative_advantages():
    inputs = inputs_of([5.0, 5.0, 2.0], [-1, 1, -1])
    output = find_loss("ppo_dual_clip")(inputs, AlgorithmConfig(loss="ppo_dual_clip", dual_clip=2.5))
    assert output.token_loss.tolist() == pytest.approx([2.5, -1.2, 2.0])
    assert gradient(output, inputs) == pytest.approx([0, 0, 2.0])
    assert output.means["train/dual_clip_share"][0] == 1


def test_gspo_uses_the_geometric_mean_of_each_response():
    inputs = inputs_of([2.0, 0.5, 1.21, 9.0, 1.0], [1, 1, 1, 1, 1], mask=[1, 1, 1, 0, 1], sequence_ids=[0, 0, 1, 1, 1])
    output = find_loss("gspo")(inputs, AlgorithmConfig(loss="gspo", clip_high=0.05, aggregation="sequence_mean"))
    assert output.token_loss[[0, 1]].tolist() == pytest.approx([-1, -1])
    assert output.token_loss[[2, 4]].tolist() == pytest.approx([-1.05, -1.05])  # sqrt(1.21) = 1.1 is clipped
    assert gradient(output, inputs)[:3] == pytest.approx([-1, -1, 0])


def test_gspo_token_form_has_the_gradient_of_the_sequence_form():
    inputs = inputs_of([1.3, 0.9, 1.1, 0.8, 1.05], [2, 2, -1, -1, -1], sequence_ids=[0, 0, 1, 1, 1])
    options = AlgorithmConfig(loss="gspo", clip_low=0.9, clip_high=0.9)
    lengths = inputs.sequence_sum(inputs.mask)
    (find_loss("gspo")(inputs, options).token_loss / inputs.to_tokens(lengths) / 2).sum().backward()
    found, inputs.logprobs.grad = inputs.logprobs.grad, None
    ratios = torch.exp(inputs.sequence_mean(inputs.logprobs - inputs.old_logprobs))
    (-ratios * torch.tensor([2.0, -1.0])).mean().backward()
    assert found.tolist() == pytest.approx(inputs.logprobs.grad.tolist())


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    inputs = inputs_of([5.0, 0.1, 1.1], [1, -1, 1])
    output = find_loss("cispo")(inputs, AlgorithmConfig(loss="cispo", clip_low=0.2, clip_high=0.3))
    weights = [1.3, 0.8, 1.1]
    assert gradient(output, inputs) == pytest.approx([-1.3, 0.8, -1.1])
    expected = [-w * a * lp for w, a, lp in zip(weights, [1, -1, 1], inputs.logprobs.tolist(), strict=True)]
    assert output.token_loss.tolist() == pytest.approx(expected)
    assert output.means["train/clip_share"][0] == 2


@pytest.mark.parametrize("name", ["ppo_clip", "ppo_dual_clip", "gspo", "cispo"])
def test_metrics_are_of_trained_tokens_alone(name):
    ratios, advantages, rollout = [5.0, 0.1, 1.1, 7.0, 0.2], [-1, -1, 1, -1, 1], [0.25, 4.0, 1.5, 8.0, 9.0]
    correction = CorrectionConfig(weight="token", weight_max=2.0, mask="token", mask_min=0.5, mask_max=5.0)

    def means(tokens, mask):
        inputs = inputs_of(
            [ratios[token] for token in tokens],
            [advantages[token] for token in tokens],
            mask=mask,
            rollout_ratios=[rollout[token] for token in tokens],
        )
        output = correct_mismatch(find_loss(name)(inputs, AlgorithmConfig(loss=name)), inputs, correction)
        assert {float(count) for _, count in output.means.values()} == {4}
        return {metric: float(total) for metric, (total, _) in output.means.items()}

    found = means([0, 1, 2, 3, 4], [1, 1, 1, 0, 1])
    assert found == pytest.approx(means([0, 1, 2, 4], None))
    assert any(found.values())


@pytest.mark.parametrize("name", ["ppo_clip", "ppo_dual_clip", "gspo", "cispo"])
def test_on_policy_the_gradient_is_that_of_reinforce(name):
    inputs = inputs_of([1.5, 0.7, 2.0], [1.0, -2.0, 0.5])
    on_policy = LossInputs(**{**inputs.__dict__, "old_logprobs": None})
    output = find_loss(name)(on_policy, AlgorithmConfig(loss=name))
    assert gradient(output, on_policy) == pytest.approx([-1.0, 2.0, -0.5])


RATIOS = [0.25, 4.0, 1.5, 8.0, 1.0]
SEQUENCES = [0, 0, 1, 1, 1]  # products 1 and 12 (8.0 is not trained), geometric means 1 and sqrt(1.5)
MASK = [1, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("TIS", dict(weight="token", weight_max=2.0), [0.25, 2, 1.5, 1]),
        ("sequence TIS", dict(weight="sequence", weight_max=1.2), [1, 1, 1.2, 1.2]),
        ("MIS", dict(weight="token", weight_max=None, mask="token", mask_max=2.0), [0.25, 0, 1.5, 1]),
        (
            "IcePop",
            dict(weight="token", weight_max=None, mask="token", mask_min=0.5, mask_max=5.0),
            [0, 4, 1.5, 1],
        ),
        ("sequence mask", dict(mask="sequence", mask_min=0.5, mask_max=1.4), [1, 1, 0, 0]),
        ("geometric mask", dict(mask="geometric", mask_min=0.9, mask_max=1.2), [1, 1, 0, 0]),
        ("wide geometric mask", dict(mask="geometric", mask_min=0.9, mask_max=1.3), [1, 1, 1, 1]),
        ("off", dict(), [1, 1, 1, 1]),
    ],
)
def test_mismatch_corrections(name, options, expected):
    inputs = inputs_of([1.0] * 5, [1] * 5, mask=MASK, sequence_ids=SEQUENCES, rollout_ratios=RATIOS)
    plain = LossOutput(token_loss=-inputs.logprobs * 1.0)
    corrected = correct_mismatch(plain, inputs, CorrectionConfig(**options))
    found = gradient(corrected, inputs)
    assert [found[i] for i in (0, 1, 2, 4)] == pytest.approx([-value for value in expected])


def test_mismatch_correction_counts_masked_tokens_and_stays_finite():
    inputs = inputs_of([1.0, 1.0], [1, 1], rollout_ratios=[1e300, 1.0])
    corrected = correct_mismatch(
        LossOutput(token_loss=inputs.logprobs),
        inputs,
        CorrectionConfig(weight="sequence", weight_max=None, mask="token", mask_max=2.0),
    )
    assert torch.isfinite(corrected.token_loss).all()
    total, count = corrected.means["mismatch/masked_share"]
    assert (float(total), float(count)) == (1, 2)
    assert math.isfinite(corrected.means["mismatch/weight_mean"][0])


def test_mismatch_correction_has_no_gradient_of_its_own_on_policy():
    inputs = inputs_of([1.0, 1.0], [1, 1], rollout_ratios=[1.5, 0.5])
    on_policy = LossInputs(**{**inputs.__dict__, "old_logprobs": None})
    output = find_loss("ppo_clip")(on_policy, AlgorithmConfig())
    corrected = correct_mismatch(output, on_policy, CorrectionConfig(weight="token"))
    assert gradient(corrected, on_policy) == pytest.approx([-1.5, -0.5])


def test_the_rollout_engine_can_be_the_old_policy():
    inputs = inputs_of([1.1, 1.0], [1, -1], rollout_ratios=[1.5, 0.5])
    inputs = LossInputs(**{**inputs.__dict__, "entropy": torch.zeros_like(inputs.mask)})
    output = objective(inputs, AlgorithmConfig(old_policy="rollout", clip_high=0.9))
    assert output.token_loss.tolist() == pytest.approx([-1.1 * 1.5, 0.8])
    assert float(output.maxima["mismatch/logprob_abs_max"]) == pytest.approx(math.log(2))


@pytest.mark.parametrize(("estimator", "expected"), [("k2", 0.5 * math.log(2) ** 2), ("k3", 0.5 - 1 + math.log(2))])
def test_kl_and_entropy_terms_of_the_objective(estimator, expected):
    inputs = inputs_of([1.0], [0.0])
    reference = inputs.logprobs.detach() - math.log(2)
    inputs = LossInputs(**{**inputs.__dict__, "entropy": torch.full_like(inputs.mask, 0.7), "ref_logprobs": reference})
    options = AlgorithmConfig(kl=KLConfig(coefficient=0.1, estimator=estimator), entropy_coefficient=0.2)
    assert objective(inputs, options).token_loss.tolist() == pytest.approx([0.1 * expected - 0.2 * 0.7])


@pytest.mark.parametrize("name", ["ppo_clip", "ppo_dual_clip", "gspo"])
def test_clipped_tokens_are_those_whose_gradient_the_bound_takes(name):
    """A ratio beyond a bound from which the advantage leads back is not clipped."""
    inputs = inputs_of([1.1, 1.5, 0.5, 1.5, 0.5], [1, 1, 1, -1, -1], sequence_ids=[0, 1, 2, 3, 4])
    output = find_loss(name)(inputs, AlgorithmConfig(loss=name, clip_low=0.3, clip_high=0.28))
    assert float(output.means["train/clip_share"][0]) == gradient(output, inputs).count(0) == 2


def test_the_ratio_that_cispo_reports_is_the_one_before_its_bounds():
    output = find_loss("cispo")(inputs_of([5.0, 0.1, 1.1], [1, -1, 1]), AlgorithmConfig(loss="cispo"))
    assert float(output.means["train/ratio_mean"][0]) == pytest.approx(6.2)
