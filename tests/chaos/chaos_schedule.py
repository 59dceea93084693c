"""What is done to a run, and when. New victims and ways go into the two tables."""

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

TITLES = {"scheduler": ("sglang::scheduler",), "engine": ("ray::Engine",)}
"""Victims, by what stands in the names of their processes."""

ROLLOUT = ("scheduler", "engine")
"""Victims of which a run heals by itself, because other engines take their places."""

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "exit": signal.SIGTERM}
"""Ways of disturbing a process."""

PHASES = ("rollout", "train", "weight_sync", "eval", "checkpoint")
"""Of an iteration of every run; a colocated one that shares memory also has `sleep` and `wake`."""


@dataclass(frozen=True)
class Strike:
    """In `iteration`, `delay_seconds` after `phase` has begun, `victim` number `which` (all, where None) is struck."""

    victim: str
    how: str
    phase: str
    iteration: int
    delay_seconds: float = 0.0
    which: int | None = 0

    @property
    def name(self) -> str:
        return f"{self.how} {self.victim} in {self.phase} of iteration {self.iteration}"


def drawn_schedule(seed: int, victims: Sequence[str], phases: Sequence[str], iterations: int) -> list[Strike]:
    """One strike in each of the iterations, drawn from all combinations without repeating one."""
    numbers = random.Random(seed)
    kinds = [(victim, how, phase) for victim in victims for how in SIGNALS for phase in phases]
    chosen = numbers.sample(kinds, min(iterations, len(kinds)))
    return [
        Strike(victim, how, phase, iteration, round(numbers.uniform(0.0, 0.6), 3))
        for iteration, (victim, how, phase) in enumerate(chosen, start=1)
    ]
