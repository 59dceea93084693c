"""Correction of the policy loss for the mismatch between the rollout engine and the actor."""

from dataclasses import replace

import torch
from torch import Tensor

from actor.losses.types import LossInputs, LossOutput
from rlpipe.config.algorithm import CorrectionConfig

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to it, so that a product over thousands of tokens stays finite."""


def correct_mismatch(output: LossOutput, inputs: LossInputs, options: CorrectionConfig) -> LossOutput:
    """Multiply the policy loss per token by a truncated importance weight and a 0/1 mask; neither has a gradient.

    With r_t = exp(anchor_logprobs - rollout_logprobs) and R the product over the trained tokens of the response:
        weight  token: min(r_t, weight_max)     TIS, Yao et al., "Your efficient RL framework secretly brings you
                                                off-policy RL training" (2025)
                sequence: min(R, weight_max)
        mask    token: mask_min <= r_t <= mask_max    MIS; IcePop, arXiv 2510.18855
                sequence: the same for R              Liu et al., "When speed kills stability" (2025)
                geometric: the same for R^(1 / trained tokens)
    The denominator of the aggregation does not change: masked tokens count in it.
    """
    if not options.active:
        return output
    with torch.no_grad():
        log_ratio = (inputs.anchor_logprobs - inputs.rollout_logprobs) * inputs.mask
        weight = _weight(log_ratio, inputs, options)
        kept = _kept(log_ratio, inputs, options)
        tokens = inputs.mask.sum()
        means = {
            "mismatch/weight_mean": ((weight * inputs.mask).sum(), tokens),
            "mismatch/masked_share": (((1 - kept) * inputs.mask).sum(), tokens),
        }
    return replace(output, token_loss=output.token_loss * weight * kept, means={**output.means, **means})


def _weight(log_ratio: Tensor, inputs: LossInputs, options: CorrectionConfig) -> Tensor:
    if options.weight == "none":
        return torch.ones_like(log_ratio)
    weight = _ratio(log_ratio, inputs, options.weight)
    return weight if options.weight_max is None else weight.clamp(max=options.weight_max)


def _kept(log_ratio: Tensor, inputs: LossInputs, options: CorrectionConfig) -> Tensor:
    if options.mask == "none" or options.mask_max is None:
        return torch.ones_like(log_ratio)
    ratio = _ratio(log_ratio, inputs, options.mask)
    return ((ratio >= options.mask_min) & (ratio <= options.mask_max)).to(log_ratio.dtype)


def _ratio(log_ratio: Tensor, inputs: LossInputs, level: str) -> Tensor:
    match level:
        case "sequence":
            log_ratio = inputs.to_tokens(inputs.sequence_sum(log_ratio))
        case "geometric":
            log_ratio = inputs.to_tokens(inputs.sequence_mean(log_ratio))
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
