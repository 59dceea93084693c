"""A small run in which every phase of the driver sleeps once: `planted_run.py ITERATION SECONDS CONFIG [KEY=VALUE]...`.

Run as a program by test_phase_times.py: real Ray, SGLang and Megatron-core, with sleeps planted around real work.
"""

import asyncio
import functools
import sys
import time
from typing import Any

from rlpipe.commands.environment import set_defaults
from rlpipe.config.load import load_config
from rlpipe.generation.producer import Rollouts
from rlpipe.shared import interrupts
from rlpipe.training.evaluation import Evaluation
from rlpipe.training.iteration import IterationRecord
from rlpipe.training.learner import Learner
from rlpipe.training.measurement import Measurement
from rlpipe.training.session import Session
from rlpipe.training.weight_sync import WeightSync

PLANTED = {
    "rollout": (Rollouts, "take"),
    "ref_logprob": (Learner, "reference_logprobs"),
    "old_logprob": (Learner, "old_logprobs"),
    "advantage": (Learner, "advantages"),
    "pack": (Learner, "pack"),
    "train_other": (Learner, "begin_train"),
    "weight_sync": (WeightSync, "push"),
    "eval": (Evaluation, "run"),
    "checkpoint": (Session, "checkpoint"),
    "tracking": (Measurement, "finish"),
}


class Sleeper:
    """Sleeps before the first call of each planted method in the chosen iteration."""

    def __init__(self, iteration: int, seconds: float) -> None:
        self._iteration, self._seconds = iteration, seconds
        self._current = -1
        self._slept: set[str] = set()
        self._wrap(IterationRecord, "__init__", self._note)
        for phase, (owner, method) in PLANTED.items():
            self._wrap(owner, method, functools.partial(self._sleep, phase))

        self._slow_grading()

    def _slow_grading(self) -> None:
        """Grading runs in an event loop beside generation; all graders sleep at the same time."""
        grade = Rollouts._grade

        async def slow(rollouts: Rollouts, sample: Any) -> Any:
            if self._current == self._iteration:
                await asyncio.sleep(self._seconds)
            return await grade(rollouts, sample)

        Rollouts._grade = slow  # type: ignore[method-assign]

    def _wrap(self, owner: type, method: str, before: Any) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            before(*args)
            return original(*args, **kwargs)

        setattr(owner, method, wrapper)

    def _note(self, record: IterationRecord, number: int, *_: Any) -> None:
        self._current = number

    def _sleep(self, phase: str, *_: Any) -> None:
        if self._current == self._iteration and phase not in self._slept:
            self._slept.add(phase)
            time.sleep(self._seconds)


def main() -> None:
    iteration, seconds, config, *overrides = sys.argv[1:]
    set_defaults()
    interrupts.install()
    Sleeper(int(iteration), float(seconds))
    from rlpipe.training.train import train

    train(load_config(config, overrides))


if __name__ == "__main__":
    main()
