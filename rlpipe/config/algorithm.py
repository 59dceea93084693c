"""What is optimized: advantages, policy loss, KL, aggregation, corrections."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rlpipe.config.base import Section


class KLConfig(Section):
    """Penalty for leaving the reference policy."""

    coefficient: float = Field(0.0, ge=0)
    """0: no penalty, and no reference pass."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of KL(policy || reference) per token; see Schulman, "Approximating KL divergence" (2020)."""

    placement: Literal["loss", "reward"] = "loss"
    """Added to the loss, or subtracted from the reward."""


class OverlongConfig(Section):
    """Responses that meet or come near the token limit (DAPO, arXiv 2503.14476, section 3.4)."""

    mask_truncated: bool = False
    """Leave truncated responses out of the loss (overlong filtering); their score still counts in the group."""

    buffer_tokens: int = Field(0, ge=0)
    """Soft punishment: over the last so many tokens before the limit the score falls linearly. 0: none."""

    penalty: float = Field(1.0, gt=0)
    """What is subtracted at the limit."""


class AlgorithmConfig(Section):
    """GRPO and its family."""

    advantage: str = "grpo"
    """Registered advantage function."""

    normalize_by_std: bool = True
    """Divide by the group's standard deviation ("grpo" only)."""

    overlong: OverlongConfig = OverlongConfig()
    """Treatment of over-long responses."""

    loss: str = "ppo_clip"
    """Registered policy loss."""

    clip_low: float = Field(0.2, ge=0)
    """Lower clip distance of the importance ratio."""

    clip_high: float = Field(0.2, ge=0)
    """Upper clip distance ("clip-higher" when above `clip_low`; DAPO, arXiv 2503.14476)."""

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum_norm", "group_mean"] = "token_mean"
    """How token losses become one number; the denominator is global over the optimizer step."""

    kl: KLConfig = KLConfig()
    """KL penalty against the reference policy."""

    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus; 0 skips its computation in the backward pass."""

    updates_per_iteration: int = Field(1, ge=1)
    """Optimizer steps per iteration; with 1 the step is on-policy and no old log-probabilities are computed."""

    @model_validator(mode="after")
    def _k1_has_no_gradient_in_the_loss(self) -> Self:
        if self.kl.coefficient > 0 and self.kl.placement == "loss" and self.kl.estimator == "k1":
            raise ValueError(
                "algorithm.kl.estimator 'k1' in the loss has a gradient of zero mean: use 'k2' or 'k3', "
                "or algorithm.kl.placement 'reward'"
            )
        return self
