"""What is optimized: advantages, policy loss, KL, aggregation, corrections."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rlpipe.config.base import Section

ADVANTAGES = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "turn_rloo",
    "turn_grpo",
)
"""Registered advantage functions (`rlpipe.algorithms.advantages`)."""

GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "turn_rloo", "turn_grpo")
"""Those that compare a response with the others of its group, so that a group of one teaches nothing."""

LOSSES = ("ppo_clip", "ppo_dual_clip", "gspo", "cispo", "sft")
"""Registered losses (`actor.losses.loss_registry`)."""


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
    """Soft punishment: over the last N tokens before the limit the score falls linearly. 0: none."""

    penalty: float = Field(1.0, gt=0)
    """What is subtracted at the limit."""


class CorrectionConfig(Section):
    """Correction of the policy loss for a rollout engine whose probabilities differ from the actor's.

    With r = exp(actor's log-prob - engine's log-prob) of the policy that sampled, each token's loss is multiplied by a
    weight and by a 0/1 mask. TIS, MIS and IcePop are settings of these; see docs/algorithms.md.
    """

    weight: Literal["none", "token", "sequence"] = "none"
    """r of the token, or the product over the trained tokens of its response; `none`: 1."""

    weight_max: float | None = Field(2.0, gt=0)
    """Truncate the weight at this value; empty: never."""

    mask: Literal["none", "token", "sequence", "geometric"] = "none"
    """What must lie between `mask_min` and `mask_max`: r, the product, or the geometric mean over the response."""

    mask_min: float = Field(0.0, ge=0)
    """Below it the mask is 0."""

    mask_max: float | None = Field(None, gt=0)
    """Above it the mask is 0."""

    @property
    def active(self) -> bool:
        return self.weight != "none" or self.mask != "none"

    @model_validator(mode="after")
    def _the_mask_has_bounds(self) -> Self:
        if self.mask == "none" and (self.mask_max is not None or self.mask_min > 0):
            raise ValueError(
                "algorithm.correction.mask_min and mask_max do nothing while algorithm.correction.mask is 'none': "
                "set mask to 'token', 'sequence' or 'geometric', or remove the bounds"
            )
        if self.mask != "none" and self.mask_max is None:
            raise ValueError(
                f"algorithm.correction.mask '{self.mask}' needs a bound: set algorithm.correction.mask_max, "
                "for instance 5.0 for 'token' or 1.01 for 'geometric'"
            )
        if self.mask_max is not None and self.mask_min >= self.mask_max:
            raise ValueError(
                f"algorithm.correction.mask_min {self.mask_min} is not below mask_max {self.mask_max}, "
                "so every token would be masked: lower mask_min"
            )
        return self


class AlgorithmConfig(Section):
    """GRPO and its family."""

    advantage: str = "grpo"
    """Advantage function: grpo, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, which give all turns
    of a response one advantage; turn_rloo, turn_grpo, which give each turn its own; or your own as
    `package.module:function`."""

    turn_discount: float = Field(1.0, ge=0, le=1)
    """What the rewards of the next turn count for a turn, in "turn_rloo" and "turn_grpo". 1: a turn answers for all
    that comes after it; 0: for its own reward alone."""

    normalize_by_std: bool = True
    """Divide by the group's standard deviation ("grpo" only)."""

    overlong: OverlongConfig = OverlongConfig()
    """Treatment of over-long responses."""

    loss: str = "ppo_clip"
    """Policy loss: ppo_clip, ppo_dual_clip, gspo, cispo, or your own as `package.module:function`; sft is the
    supervised one."""

    clip_low: float = Field(0.2, ge=0)
    """Lower clip distance of the importance ratio."""

    clip_high: float = Field(0.2, ge=0)
    """Upper clip distance ("clip-higher" when above `clip_low`; DAPO, arXiv 2503.14476)."""

    dual_clip: float = Field(3.0, gt=1)
    """Bound of the ratio for negative advantages, used by the loss "ppo_dual_clip" (arXiv 1912.09729)."""

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum_norm", "episode_mean", "group_mean"] = (
        "token_mean"
    )
    """How token losses become one number; the denominator is global over the optimizer step. With `episode_mean` each
    episode weighs the same, however many turns and branches it has."""

    kl: KLConfig = KLConfig()
    """KL penalty against the reference policy."""

    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus; 0 skips its computation in the backward pass."""

    correction: CorrectionConfig = CorrectionConfig()
    """Correction for the mismatch between the rollout engine and the actor."""

    old_policy: Literal["actor", "rollout"] = "actor"
    """Whose log-probabilities the importance ratio is taken against: the actor's before the update, or those that the
    rollout engine reported (no pass for them is ever needed then, and the clip also bounds the mismatch)."""

    routing_replay: bool = False
    """Send each token to the experts that the rollout engine sent it to (R3, arXiv 2510.11370), in all passes of the
    policy. For models with experts."""

    updates_per_iteration: int = Field(1, ge=1)
    """Optimizer steps per iteration; with 1 the step is on-policy and no old log-probabilities are computed."""

    def needs_old_pass(self, stale: bool) -> bool:
        """Whether an iteration computes log-probabilities under the actor before its update. stale: whether tokens of
        the iteration were sampled by older weights; where none was and one step is made, the update's own forward pass
        gives the same values."""
        return self.old_policy == "actor" and (stale or self.updates_per_iteration > 1)

    @field_validator("advantage")
    @classmethod
    def _advantage_is_known(cls, name: str) -> str:
        if name not in ADVANTAGES and ":" not in name:
            raise ValueError(
                f"algorithm.advantage '{name}' is unknown: use one of {', '.join(ADVANTAGES)}, "
                "or package.module:function"
            )
        return name

    @field_validator("loss")
    @classmethod
    def _loss_is_known(cls, name: str) -> str:
        if name not in LOSSES and ":" not in name:
            raise ValueError(
                f"algorithm.loss '{name}' is unknown: use one of {', '.join(LOSSES)}, or package.module:function"
            )
        return name

    @model_validator(mode="after")
    def _k1_has_no_gradient_in_the_loss(self) -> Self:
        if self.kl.coefficient > 0 and self.kl.placement == "loss" and self.kl.estimator == "k1":
            raise ValueError(
                "algorithm.kl.estimator 'k1' in the loss has a gradient of zero mean: use 'k2' or 'k3', "
                "or algorithm.kl.placement 'reward'"
            )
        return self

    @model_validator(mode="after")
    def _dr_grpo_is_a_pair(self) -> Self:
        if self.advantage == "dr_grpo" and self.aggregation != "sequence_sum_norm":
            raise ValueError(
                f"algorithm.advantage 'dr_grpo' with aggregation '{self.aggregation}' brings back the length bias that "
                "Dr.GRPO removes: set algorithm.aggregation to 'sequence_sum_norm', or use advantage 'grpo' with "
                "normalize_by_std false"
            )
        return self

    @model_validator(mode="after")
    def _gspo_has_one_ratio_per_response(self) -> Self:
        levels = (self.correction.weight, self.correction.mask)
        if self.loss == "gspo" and "token" in levels:
            raise ValueError(
                "algorithm.loss 'gspo' has one ratio per response, which a correction per token would break up: set "
                "algorithm.correction.weight and mask to 'sequence', 'geometric' or 'none'"
            )
        return self

    @model_validator(mode="after")
    def _a_correction_compares_two_policies(self) -> Self:
        if self.correction.active and self.old_policy == "rollout":
            raise ValueError(
                "algorithm.correction compares the actor with the rollout engine, but algorithm.old_policy 'rollout' "
                "already takes the ratio against the engine, so the correction would count twice: "
                "set correction.weight and mask to 'none', or old_policy to 'actor'"
            )
        return self

    @model_validator(mode="after")
    def _supervised_loss_stands_alone(self) -> Self:
        if self.loss == "sft" and (self.kl.coefficient > 0 or self.entropy_coefficient > 0 or self.correction.active):
            raise ValueError(
                "algorithm.loss 'sft' has no KL, entropy or correction term: set algorithm.kl.coefficient and "
                "entropy_coefficient to 0 and correction.weight and mask to 'none', or choose a policy loss"
            )
        return self
