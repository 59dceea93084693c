"""Named phases of an iteration, measured on a monotonic clock."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

PHASES = {
    "data": "taking the next examples (supervised runs; prompts are taken while responses are generated)",
    "rollout": "waiting for responses; grading runs beside it",
    "reward": "grading that was not finished when generation ended",
    "advantage": "computing advantages",
    "pack": "laying sequences into packs",
    "ref_logprob": "log-probabilities under the reference policy",
    "old_logprob": "log-probabilities under the policy before the update",
    "forward": "forward passes of the update",
    "backward": "its backward passes",
    "optimizer": "zeroing and finishing gradients, clipping and the Adam step",
    "exchange": "training call: exchanges between ranks that were not hidden, transfer and waiting for peers alike",
    "train_other": "the training call less these four: packs to the device, pipeline bubbles, remote call",
    "sleep_wake": "colocated engines and actor: giving device memory back and taking it again, weights coming back",
    "weight_sync": "sending new weights to the engines",
    "eval": "held-out evaluation",
    "checkpoint": "saving a checkpoint",
    "tracking": "writing the row of the iteration before to the trackers",
}
"""Phases of an iteration and what each is, in the order of a report."""

# What the training call is divided into; its phase `train` does not last.
TRAINING_PARTS = ("forward", "backward", "optimizer", "exchange", "train_other")


@dataclass(frozen=True)
class Span:
    """One stretch of work. `start_seconds` is wall-clock time (of `time.time`), which processes share."""

    name: str
    start_seconds: float
    seconds: float


@dataclass(frozen=True)
class Counter:
    """Values at a moment of wall-clock time, for instance requests that run and that wait."""

    name: str
    seconds: float
    values: Mapping[str, float]


class PhaseClock:
    """Adds up the seconds of named phases, and keeps `spans` of them. Phases do not nest: time belongs to exactly one
    of them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        self._open: str | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._open is not None:
            raise RuntimeError(f"phase {name!r} starts inside phase {self._open!r}; phases do not nest")
        self._open = name
        wall, start = time.time(), time.perf_counter()
        try:
            yield
        finally:
            self._open = None
            elapsed = time.perf_counter() - start
            self.add(name, elapsed)
            self.spans.append(Span(name, wall, elapsed))

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
