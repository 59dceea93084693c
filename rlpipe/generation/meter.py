"""How long a batch waits for graders alone."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class GradingMeter:
    """Adds up the seconds since `restart` in which nothing was generated."""

    def __init__(self) -> None:
        self._generating = 0
        self._idle_since = time.perf_counter()
        self._idle_seconds = 0.0

    @contextmanager
    def generating(self) -> Iterator[None]:
        """For the time in which one response is written."""
        if self._generating == 0:
            self._idle_seconds += time.perf_counter() - self._idle_since
        self._generating += 1
        try:
            yield
        finally:
            self._generating -= 1
            self._idle_since = time.perf_counter()

    def restart(self) -> None:
        self._idle_seconds = 0.0
        self._idle_since = time.perf_counter()

    def take(self) -> float:
        """Seconds so far."""
        idle = self._idle_seconds
        return idle if self._generating else idle + time.perf_counter() - self._idle_since
