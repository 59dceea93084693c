"""Tells on the console that a policy loses what it could, while there is time to stop the run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlpipe.config.root import Config

_STANDARD_ERRORS = 5.0
"""By which two means are apart in less than one of a million cases if nothing changed."""
_LEAST_SHARE = 0.2
"""Of the best mean reward's distance from 0: a smaller fall is not worth a warning, however certain it is."""


@dataclass(frozen=True)
class _Rewards:
    """Of the prompts of one iteration: mean and standard error."""

    iteration: int
    mean: float
    error: float


class RewardWatch:
    """Compares the mean reward of each iteration with the best one so far."""

    def __init__(self, config: Config) -> None:
        self._prompts = config.rollout.prompts_per_iteration
        self._best: _Rewards | None = None

    def warnings(self, iteration: int, metrics: Mapping[str, float]) -> list[str]:
        """One sentence where the mean reward has fallen by more than chance explains; from then on it is compared with
        what is left. Supervised runs have no rewards and no warnings."""
        if "rollout/reward_mean" not in metrics:
            return []
        # Responses to a prompt resemble each other, so that prompts are counted.
        error = metrics["rollout/reward_std"] / math.sqrt(self._prompts)
        now, best = _Rewards(iteration, metrics["rollout/reward_mean"], error), self._best
        if best is None or now.mean >= best.mean:
            self._best = now
            return []
        fall = best.mean - now.mean
        if fall <= max(_STANDARD_ERRORS * math.hypot(best.error, now.error), _LEAST_SHARE * abs(best.mean)):
            return []
        self._best = now
        return [
            f"the mean reward fell from {best.mean:.3f} in iteration {best.iteration} to {now.mean:.3f}, more than "
            "chance explains: lower actor.optimizer.learning_rate or algorithm.updates_per_iteration, raise "
            "actor.optimizer.warmup_steps, or see what changed in data and graders"
        ]
