"""What is learned from a batch of graded samples: reward shaping and advantages. numpy only."""

from rlpipe.algorithms.advantages import ScoredBatch, advantage_function, register_advantage
from rlpipe.algorithms.compute import AdvantageCounts, AdvantageResult, compute_advantages
from rlpipe.algorithms.shaping import kl_by_sample_of, mask_off_policy

__all__ = [
    "AdvantageCounts",
    "AdvantageResult",
    "ScoredBatch",
    "advantage_function",
    "compute_advantages",
    "kl_by_sample_of",
    "mask_off_policy",
    "register_advantage",
]
