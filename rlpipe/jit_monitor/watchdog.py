"""A thread that looks at a running step: which compilers are its child processes, and does it take too long?"""

import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rlpipe.jit_monitor.events import StepStall

COMPILERS = frozenset({"nvcc", "cicc", "ptxas", "ninja", "c++", "g++", "gcc", "cc1plus", "clang", "clang++", "ld.lld"})


class Watchdog:
    """Looks once every `interval_seconds` while a step runs.

    A step that exceeds `factor` times the median of the steps before it, and `minimum_seconds`, is dumped once.
    """

    def __init__(
        self,
        factor: float,
        minimum_seconds: float,
        interval_seconds: float,
        on_stall: Callable[[StepStall], None],
    ) -> None:
        self._factor, self._minimum_seconds, self._interval_seconds = factor, minimum_seconds, interval_seconds
        self._on_stall = on_stall
        self._durations: dict[str, deque[float]] = {}
        self._step: tuple[int, str, float] | None = None  # number, kind, start
        self._dumped_step: int | None = None
        self._stalls: list[StepStall] = []
        self._compiler_seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jit-watchdog", daemon=True)
        self._thread.start()

    def begin(self, step: int, kind: str = "step") -> None:
        """A step of a kind is compared with those of its kind."""
        with self._lock:
            self._step = (step, kind, time.perf_counter())

    def end(self) -> float | None:
        """Ends the step; how many times as long as the median of the steps before it was, None for the first."""
        with self._lock:
            if self._step is None:
                return None
            (_, kind, start), self._step = self._step, None
            elapsed = time.perf_counter() - start
            before = self._durations.setdefault(kind, deque(maxlen=101))
            ratio = elapsed / statistics.median(before) if before else None
            before.append(elapsed)
        return ratio

    def drain(self) -> tuple[tuple[StepStall, ...], dict[str, float]]:
        """Stalls, and seconds for which each compiler was seen, since the last call."""
        with self._lock:
            stalls, self._stalls = tuple(self._stalls), []
            compiler_seconds, self._compiler_seconds = self._compiler_seconds, {}
        return stalls, compiler_seconds

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            with self._lock:
                running = self._step
                before = self._durations.get(running[1]) if running else None
                median = statistics.median(before) if before else None
            if running is None:
                continue
            self._look_at_children()
            step, _, start = running
            elapsed = time.perf_counter() - start
            if median is None or self._dumped_step == step:
                continue
            if elapsed > max(self._minimum_seconds, self._factor * median):
                self._dumped_step = step
                self._dump(StepStall(step, elapsed, median, stacks_of_all_threads()))

    def _look_at_children(self) -> None:
        seen = running_compilers()
        with self._lock:
            for name in seen:
                self._compiler_seconds[name] = self._compiler_seconds.get(name, 0.0) + self._interval_seconds

    def _dump(self, stall: StepStall) -> None:
        with self._lock:
            self._stalls.append(stall)
        self._on_stall(stall)


def stacks_of_all_threads() -> str:
    """The Python stacks of this process, the calling thread's own left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != own
    ]
    return "\n".join(parts)


def running_compilers() -> set[str]:
    """Names of the compilers among this process's descendants; empty where the kernel has no /proc."""
    found: set[str] = set()
    pending = ["self"]
    while pending:
        for task in Path("/proc", pending.pop(), "task").glob("*/children"):
            for child in _read(task).split():
                name = _read(Path("/proc", child, "comm")).strip()
                found |= {name} & COMPILERS
                pending.append(child)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended
        return ""
