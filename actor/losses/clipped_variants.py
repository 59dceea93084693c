"""Relatives of the clipped policy-gradient loss: dual clip, one ratio per response, a clipped weight."""

import torch

from actor.losses.clipped import ppo_clip
from actor.losses.types import LossInputs, LossOutput
from rlpipe.config.algorithm import AlgorithmConfig


def ppo_dual_clip(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput:
    """`ppo_clip`, but min(loss, -A dual_clip) where A < 0; arXiv 1912.09729.

    Without it a token that has become much more likely and has a negative advantage has an unbounded loss.
    """
    clipped = ppo_clip(inputs, options)
    bound = -inputs.advantages * options.dual_clip
    bounded = (inputs.advantages < 0) & (clipped.token_loss > bound)
    return LossOutput(
        token_loss=torch.where(bounded, bound, clipped.token_loss),
        means={**clipped.means, "train/dual_clip_share": ((bounded * inputs.mask).sum(), inputs.mask.sum())},
    )


def gspo(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput:
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(mean over the response of log r).

    GSPO-token of arXiv 2507.18071: s has the value of the response's geometric mean ratio and, at each token, the
    gradient of that token alone. With equal advantages in a response, value and gradient are those of plain GSPO under
    the aggregation `sequence_mean`. Clip distances are smaller than PPO's, about 3e-4.
    """
    log_ratio = inputs.logprobs - inputs.anchor_logprobs
    sequence_log_ratio = inputs.to_tokens(inputs.sequence_mean(log_ratio.detach()))
    ratio = torch.exp(sequence_log_ratio + inputs.logprobs - inputs.logprobs.detach())
    plain = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return LossOutput(
        token_loss=torch.maximum(plain, clipped),
        means=_ratio_metrics(inputs, ratio, clipped > plain),
    )


def cispo(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput:
    """-A clip(r, 1 - clip_low, 1 + clip_high) logprobs, with no gradient through the clipped ratio.

    CISPO, MiniMax-M1, arXiv 2506.13585: clipping bounds the weight of a token but never removes its gradient. The paper
    leaves the lower side open: `clip_low` of 1 or more.
    """
    ratio = torch.exp(inputs.logprobs.detach() - inputs.anchor_logprobs)
    weight = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return LossOutput(
        token_loss=-inputs.advantages * weight * inputs.logprobs,
        means=_ratio_metrics(inputs, ratio, weight != ratio),
    )


def _ratio_metrics(
    inputs: LossInputs, ratio: torch.Tensor, clipped: torch.Tensor
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    tokens = inputs.mask.sum()
    return {
        "train/clip_share": ((clipped * inputs.mask).sum(), tokens),
        "train/ratio_mean": ((ratio.detach() * inputs.mask).sum(), tokens),
    }
