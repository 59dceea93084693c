"""The clipped policy-gradient loss, and the loss of supervised fine-tuning."""

import torch

from actor.losses.types import LossInputs, LossOutput
from rlpipe.config.algorithm import AlgorithmConfig


def ppo_clip(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprobs - old_logprobs).

    PPO (arXiv 1707.06347, equation 7) per token; with different clip distances "clip-higher" of DAPO (arXiv
    2503.14476). In an on-policy step r is 1 and the gradient is that of -A logprobs.
    """
    ratio = torch.exp(inputs.logprobs - inputs.anchor_logprobs)
    plain = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    tokens = inputs.mask.sum()
    return LossOutput(
        token_loss=torch.maximum(plain, clipped),
        means={
            "train/clip_share": (((clipped > plain) * inputs.mask).sum(), tokens),
            "train/ratio_mean": ((ratio.detach() * inputs.mask).sum(), tokens),
        },
    )


def sft(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput:
    """Negative log-probability of the target. KL, entropy and advantages play no part."""
    return LossOutput(token_loss=-inputs.logprobs)
