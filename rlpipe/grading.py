"""The grading processes of a run."""

from rewards.pool import GradingPool
from rlpipe.config.reward import RewardConfig


def open_grading(settings: RewardConfig) -> GradingPool:
    """A pool as configured; closing it leaves no process."""
    return GradingPool(
        workers=settings.workers,
        timeout_seconds=settings.timeout_seconds,
        score_on_failure=settings.score_on_failure,
        memory_bytes=settings.memory_bytes,
        remote_connections=settings.remote_connections,
    )
