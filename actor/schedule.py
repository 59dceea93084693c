"""The learning-rate schedule. Pure."""

import math

from rlpipe.config.actor import OptimizerConfig


def learning_rate_at(step: int, options: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of the optimizer step after `step` applied ones.

    Linear warm-up reaches the peak with step `warmup_steps - 1`; then constant, or linear or cosine decay that reaches
    `minimum_learning_rate` after `decay_steps` steps (all `total_steps` when empty) and stays there.
    """
    peak, floor = options.learning_rate, options.minimum_learning_rate
    if step < options.warmup_steps:
        return peak * (step + 1) / options.warmup_steps
    if options.schedule == "constant":
        return peak
    end = options.decay_steps or total_steps
    share = min(1.0, (step - options.warmup_steps) / max(1, end - options.warmup_steps))
    if options.schedule == "linear":
        return peak + (floor - peak) * share
    return floor + (peak - floor) * (1 + math.cos(math.pi * share)) / 2
