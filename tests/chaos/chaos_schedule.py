"""What is done to a run, and when. New victims and ways go into the two tables."""

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

TITLES = {
    "scheduler": "sglang::scheduler",
    "engine": "ray::Engine",
    "actor": "ray::_Process",
    "grader": "rewards.grading_worker",
    "raylet": "raylet/raylet",
    "gcs": "gcs_server",
    "driver": "-m rlpipe train",
}
"""Victims, by what stands in the names of their processes; the driver is the process that strikes."""

ROLLOUT = ("scheduler", "engine")
"""Victims of which a run heals by itself, because other engines take their places."""

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "exit": signal.SIGTERM}
"""Ways of disturbing a process."""

DISK = "disk"
"""A victim that is no process: the file system of the run's folder, whose room is filled up (`fill`) by `FILLER`."""

FILLER = "filler"

MOMENTS = (
    ("eval", 0),
    ("rollout", 1),
    ("train", 2),
    ("weight_sync", 2),
    ("eval", 2),
    ("checkpoint", 2),
    ("train", 3),
    ("checkpoint", 4),
)
"""Phases of the small run with the iteration that each is disturbed in."""

STARTS = (
    "starting Ray",
    "starting engines",
    "starting the actor",
    "warm start",
    "waiting for the engines",
    "sending weights",
)
"""Tasks of a start, by words on the console; in a colocated run engines load in `starting engines`."""

PHASES = ("rollout", "train", "weight_sync", "eval", "checkpoint")
"""Of an iteration of every run; a colocated one that shares memory also has `sleep` and `wake`."""


@dataclass(frozen=True)
class Strike:
    """`delay_seconds` after `phase` of `iteration` has begun, `victim` number `which` (all, where None) is struck.

    iteration: None for a task of the start, of which `phase` has some words; there the strike waits for its victim, and
    the delay begins when it is there.
    """

    victim: str
    how: str
    phase: str
    iteration: int | None
    delay_seconds: float = 0.0
    which: int | None = 0

    @property
    def name(self) -> str:
        where = "" if self.iteration is None else f" of iteration {self.iteration}"
        return f"{self.how} {self.victim} in {self.phase}{where}"

    def is_due(self, iteration: int | None, words: str) -> bool:
        """Whether what begins is what it waits for."""
        if self.iteration != iteration:
            return False
        return self.phase in words if iteration is None else self.phase == words


def drawn_schedule(seed: int, victims: Sequence[str], phases: Sequence[str], iterations: int) -> list[Strike]:
    """One strike in each of the iterations, drawn from all combinations without repeating one."""
    numbers = random.Random(seed)
    kinds = [(victim, how, phase) for victim in victims for how in SIGNALS for phase in phases]
    chosen = numbers.sample(kinds, min(iterations, len(kinds)))
    return [
        Strike(victim, how, phase, iteration, round(numbers.uniform(0.0, 0.6), 3))
        for iteration, (victim, how, phase) in enumerate(chosen, start=1)
    ]
