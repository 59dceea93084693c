"""Named phases of an iteration, measured on a monotonic clock."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One stretch of work. `start_seconds` is wall-clock time (of `time.time`), which processes share."""

    name: str
    start_seconds: float
    seconds: float


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
