"""What an objective reads besides the policy's log-probabilities. Pure: imports no torch."""

from rlpipe.config.algorithm import AlgorithmConfig

SUPERVISED = "sft"


def needs_reference(options: AlgorithmConfig) -> bool:
    """Whether the loss itself reads reference log-probabilities."""
    return options.loss != SUPERVISED and options.kl.coefficient > 0 and options.kl.placement == "loss"


def needs_entropy(options: AlgorithmConfig) -> bool:
    """Whether the entropy is computed: it is a metric of every policy loss, and has a gradient only with a bonus."""
    return options.loss != SUPERVISED
