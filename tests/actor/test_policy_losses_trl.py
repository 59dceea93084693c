"""Our losses against TRL's `GRPOTrainer._compute_loss` on equal log-probabilities: value and gradient.

TRL's function runs as it is; a plain object stands for the trainer and holds only the settings that it reads. Where
definitions differ the test says how one is written in terms of the other:

- TRL's CISPO bound is the largest ratio itself, ours is 1 + `clip_high`; TRL leaves the lower side open (`clip_low` 1).
- TRL's entropy bonus is a token mean whatever the loss type, so it is compared under `token_mean` only.
- TRL counts sequences without trained tokens in its means, we do not, so every sequence here has some.
"""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from actor.losses.correction import correct_mismatch
from actor.losses.objective import objective
from actor.losses.types import LossInputs, LossOutput
from rlpipe.batching import sequence_weights
from rlpipe.config.algorithm import AlgorithmConfig, CorrectionConfig, KLConfig

LENGTHS = (5, 2, 7, 1)
MAX_TOKENS = 9


def batch(seed: int) -> dict[str, torch.Tensor]:
    """[4, 7] tensors, right-padded; old, reference and rollout log-probs lie around the new ones."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    mask = (torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]).double()
    new = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    around = [new + 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    return {
        "new": new,
        "old": around[0],
        "reference": around[1],
        "rollout": around[2],
        "entropy": torch.rand(shape, generator=generator, dtype=torch.float64),
        "mask": mask,
        "advantages": torch.randn(shape[0], generator=generator, dtype=torch.float64),
    }


def trl_loss(data: dict[str, torch.Tensor], **settings) -> tuple[float, torch.Tensor]:
    from trl.trainer.grpo_trainer import GRPOTrainer

    new = data["new"].clone().requires_grad_()
    options = dict(
        loss_type="grpo",
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.28,
        beta=0.0,
        entropy_coef=0.0,
        delta=None,
        importance_sampling_ratio=None,
    )
    options.update(settings)
    args = SimpleNamespace(delta=options.pop("delta"), use_bias_correction_kl=False, steps_per_generation=1)
    ratio = options.pop("importance_sampling_ratio")
    trainer = SimpleNamespace(
        **options,
        args=args,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=ratio is not None,
        vllm_importance_sampling_correction=True,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=options["entropy_coef"] > 0,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=False, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        _get_per_token_logps_and_entropies=lambda *a, **k: (new, data["entropy"], None),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1),
        "completion_ids": torch.zeros(data["mask"].shape, dtype=torch.long),
        "completion_mask": data["mask"],
        "advantages": data["advantages"],
        "old_per_token_logps": data["old"],
        "ref_per_token_logps": data["reference"],
        "importance_sampling_ratio": ratio,
        "num_items_in_batch": data["mask"].sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return float(loss.detach()), new.grad[data["mask"] == 1]


def our_inputs(data: dict[str, torch.Tensor], aggregation: str) -> LossInputs:
    rows = np.arange(len(LENGTHS))
    weights = torch.tensor(sequence_weights(np.array(LENGTHS), rows, aggregation, MAX_TOKENS))
    kept = data["mask"] == 1
    ids = torch.tensor(rows)[:, None].expand_as(data["mask"])[kept]
    return LossInputs(
        logprobs=data["new"][kept].requires_grad_(),
        mask=data["mask"][kept],
        weights=weights[ids],
        advantages=data["advantages"][ids],
        rollout_logprobs=data["rollout"][kept],
        sequence_ids=ids,
        sequences=len(LENGTHS),
        entropy=data["entropy"][kept],
        old_logprobs=data["old"][kept],
        ref_logprobs=data["reference"][kept],
    )


def our_loss(data: dict[str, torch.Tensor], options: AlgorithmConfig) -> tuple[float, torch.Tensor]:
    inputs = our_inputs(data, options.aggregation)
    loss = (objective(inputs, options).token_loss * inputs.weights).sum()
    loss.backward()
    return float(loss.detach()), inputs.logprobs.grad


def assert_equal(ours: tuple[float, torch.Tensor], theirs: tuple[float, torch.Tensor]) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-12)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-12, atol=1e-14)


CLIP_HIGHER = dict(clip_low=0.2, clip_high=0.28)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (dict(aggregation="sequence_mean"), dict(loss_type="grpo")),
        (dict(aggregation="token_mean"), dict(loss_type="bnpo")),
        (dict(aggregation="token_mean"), dict(loss_type="dapo")),
        (dict(aggregation="sequence_sum_norm"), dict(loss_type="dr_grpo")),
        (dict(aggregation="sequence_mean", kl=KLConfig(coefficient=0.1)), dict(loss_type="grpo", beta=0.1)),
        (dict(aggregation="token_mean", entropy_coefficient=0.3), dict(loss_type="dapo", entropy_coef=0.3)),
        (dict(loss="ppo_dual_clip", dual_clip=1.5), dict(loss_type="dapo", delta=1.5)),
        (
            dict(loss="gspo", aggregation="sequence_mean"),
            dict(loss_type="grpo", importance_sampling_level="sequence"),
        ),
        (dict(loss="cispo", clip_low=1.0, clip_high=0.4), dict(loss_type="cispo", epsilon_high=1.4)),
    ],
)
def test_losses_agree_with_trl(ours, theirs, seed):
    data = batch(seed)
    assert_equal(our_loss(data, AlgorithmConfig(**{**CLIP_HIGHER, **ours})), trl_loss(data, **theirs))


def trl_importance_ratio(data: dict[str, torch.Tensor], mode: str, low: float, high: float) -> torch.Tensor:
    """TRL's correction (`_generate_and_score_completions` of grpo_trainer.py), which it applies before the loss."""
    log_ratio = (data["old"] - data["rollout"]) * data["mask"]
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True)
    ratio = torch.exp(log_ratio)
    if mode.endswith("truncate"):
        return ratio.clamp(max=high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("correction", "mode", "low", "high"),
    [
        (dict(weight="token", weight_max=1.2), "token_truncate", 0, 1.2),
        (dict(weight="sequence", weight_max=1.2), "sequence_truncate", 0, 1.2),
        (dict(weight="token", weight_max=None, mask="token", mask_min=0.5, mask_max=1.5), "token_mask", 0.5, 1.5),
        (
            dict(weight="sequence", weight_max=None, mask="sequence", mask_min=0.3, mask_max=2.0),
            "sequence_mask",
            0.3,
            2.0,
        ),
    ],
)
def test_mismatch_corrections_agree_with_trl(correction, mode, low, high, seed):
    data = batch(seed)
    ours = our_loss(data, AlgorithmConfig(**CLIP_HIGHER, correction=CorrectionConfig(**correction)))
    ratio = trl_importance_ratio(data, mode, low, high)
    assert_equal(ours, trl_loss(data, loss_type="dapo", importance_sampling_ratio=ratio))


def test_a_correction_without_mismatch_changes_nothing():
    data = batch(0)
    data["rollout"] = data["old"]
    inputs = our_inputs(data, "token_mean")
    plain = LossOutput(token_loss=inputs.logprobs)
    options = CorrectionConfig(weight="sequence", mask="geometric", mask_min=0.99, mask_max=1.01)
    torch.testing.assert_close(correct_mismatch(plain, inputs, options).token_loss, inputs.logprobs)
