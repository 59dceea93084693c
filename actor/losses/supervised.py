"""The loss of supervised fine-tuning."""

from actor.losses.registry import register_loss
from actor.losses.types import LossInputs, LossOutput
from rlpipe.config.algorithm import AlgorithmConfig


@register_loss("sft")
def sft(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput:
    """Negative log-probability of the target. KL, entropy and advantages play no part."""
    return LossOutput(token_loss=-inputs.logprobs)
