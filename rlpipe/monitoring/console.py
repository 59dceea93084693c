"""What a person sees: where the run is, a live line per phase, a table row per iteration."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console as RichConsole
from rich.status import Status
from rich.text import Text

from rlpipe.monitoring.durations import duration_text
from rlpipe.monitoring.iteration_table import IterationTable
from rlpipe.shared.interrupts import raise_if_requested

_SAY_EVERY_SECONDS = 15.0
_SHARE_TO_ESTIMATE_FROM = 0.1


@dataclass(frozen=True)
class TaskProgress:
    """How far a task is. `tokens`: generated for it so far; `longest_tokens`: of the longest response."""

    finished: int
    wanted: int
    tokens: int = 0
    longest_tokens: int = 0


class Console:
    """Prints to the terminal; without one, plain lines for a log file."""

    def __init__(self, iterations: int, to_stderr: bool = False) -> None:
        self._rich = RichConsole(highlight=False, soft_wrap=True, stderr=to_stderr)
        self._iterations = iterations
        self._table = IterationTable(iterations)
        self._last_row: int | None = None
        self._status: Status | None = None
        self._text = ""
        self._said = ""
        self._said_seconds = time.monotonic()
        self._task_start_seconds = time.monotonic()
        self._first_progress: TaskProgress | None = None
        self._phase_seconds: dict[tuple[int, str], float] = {}
        self._usual_seconds: float | None = None

    def say(self, text: str) -> None:
        """One plain line."""
        self._rich.print(text, markup=False)
        self._said_seconds = time.monotonic()

    def header(self, facts: Sequence[tuple[str, str]]) -> None:
        """Names and values, one pair a line."""
        width = max(len(name) for name, _ in facts)
        for name, value in facts:
            self._rich.print(Text.assemble((name.ljust(width), "bold"), "  ", value))

    @contextmanager
    def task(self, text: str) -> Iterator[None]:
        """A live line while something runs; without a terminal, one line at its start."""
        raise_if_requested()
        self._begin(text)
        if not self._rich.is_terminal:
            self.say(f"{text} ...")
            yield
            return
        with self._live(text):
            yield

    @contextmanager
    def phase(self, iteration: int, name: str) -> Iterator[None]:
        """A live line for one phase of an iteration; without a terminal, only where it reports progress for long."""
        raise_if_requested()
        text = f"iteration {iteration}/{self._iterations}  {name}"
        self._begin(text)
        self._usual_seconds = self._phase_seconds.get((iteration - 1, name))
        if self._rich.is_terminal:
            with self._live(text + self._run_left()):
                yield
        else:
            yield
        # A phase may be entered twice, as `rollout` is to wait for what runs ahead: the longer stay is the phase.
        seconds = max(self._phase_seconds.get((iteration, name), 0.0), time.monotonic() - self._task_start_seconds)
        self._phase_seconds[iteration, name] = seconds
        self._phase_seconds.pop((iteration - 2, name), None)

    def progress(self, progress: TaskProgress) -> None:
        """Show how far the running task is; without a terminal, now and then and only what has changed."""
        if self._first_progress is None:
            self._first_progress = progress
        if self._status is not None:
            self._status.update(self._line(self._progress_text(progress, self._rich.width - 3, self._run_left())))
        elif not self._rich.is_terminal and time.monotonic() - self._said_seconds > _SAY_EVERY_SECONDS:
            state = f"{self._text} {progress}"
            if state != self._said:
                self._said = state
                self.say(self._progress_text(progress))

    def row(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The iteration's row, under a header that returns now and then."""
        header, row = self._table.lines(iteration, metrics, self._rich.width if self._rich.is_terminal else None)
        self._last_row = iteration
        if header is not None:
            self._rich.print(header, style="bold", markup=False)
        self._rich.print(row, markup=False)
        self._said_seconds = time.monotonic()

    def _begin(self, text: str) -> None:
        self._text = text
        self._task_start_seconds = time.monotonic()
        self._first_progress = None
        self._usual_seconds = None

    @contextmanager
    def _live(self, text: str) -> Iterator[None]:
        try:
            with self._rich.status(self._line(text)) as self._status:
                yield
        finally:
            self._status = None

    def _line(self, text: str) -> Text:
        """Never wider than the terminal, whose width may change."""
        line = Text(text)
        line.truncate(max(1, self._rich.width - 3), overflow="ellipsis")
        return line

    def _progress_text(self, progress: TaskProgress, width: int = 1000, end: str = "") -> str:
        """With `end`, and with as many of the figures as `width` characters take, the longest response going first."""
        elapsed = time.monotonic() - self._task_start_seconds
        parts = [f"{self._text}  {progress.finished:,}/{progress.wanted:,}"]
        if progress.tokens:
            begun = self._first_progress.tokens if self._first_progress else 0
            parts.append(f"{progress.tokens:,} tokens")
            parts.append(f"{(progress.tokens - begun) / max(elapsed, 1e-3):,.0f} tok/s")
            parts.append(f"longest {progress.longest_tokens:,}")
        left = self._seconds_left(progress, elapsed)
        if left is not None:
            parts.append(f"about {duration_text(left)} left")
        droppable = [
            part for start in ("longest", f"{progress.tokens:,} tok") for part in parts if part.startswith(start)
        ]
        while droppable and len(" · ".join(parts) + end) > width:
            parts.remove(droppable.pop(0))
        return " · ".join(parts) + end

    def _seconds_left(self, progress: TaskProgress, elapsed: float) -> float | None:
        """By what is finished, once that is enough to tell; before, by what the same phase took last time."""
        begun = self._first_progress.finished if self._first_progress else 0
        done, wanted = progress.finished - begun, progress.wanted - begun
        if done > 0 and done >= _SHARE_TO_ESTIMATE_FROM * wanted:
            return elapsed * (wanted - done) / done
        if self._usual_seconds is not None and self._usual_seconds > elapsed:
            return self._usual_seconds - elapsed
        return None

    def _run_left(self) -> str:
        left = "" if self._last_row is None else self._table.left(self._last_row)
        return f"   (run: {left} left)" if left else ""
