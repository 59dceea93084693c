"""What a person sees: a live line per phase, a table row per iteration."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.status import Status

from rlpipe.shared.interrupts import raise_if_requested

# Header, metric, format. A metric that an iteration lacks leaves its cell empty.
_COLUMNS = (
    ("reward", "rollout/reward_mean", "7.3f"),
    ("correct", "rollout/accuracy", "7.1%"),
    ("held-out", "eval/{dataset}/accuracy", "8.1%"),
    ("tokens", "rollout/response_tokens_mean", "6.1f"),
    ("loss", "train/loss", "8.4f"),
    ("grad norm", "train/gradient_norm", "9.3f"),
    ("mismatch", "mismatch/logprob_abs_max", "8.1e"),
    ("rollout s", "time/rollout_seconds", "9.2f"),
    ("train s", "perf/actor_train_seconds", "7.2f"),
    ("sync s", "time/weight_sync_seconds", "6.2f"),
    ("step s", "time/step_seconds", "6.2f"),
    ("rollout tok/s", "perf/rollout_tokens_per_second", "13,.0f"),
    ("train tok/s", "perf/actor_tokens_per_second", "11,.0f"),
)
_HEADER_EVERY_ROWS = 20
_SAY_EVERY_SECONDS = 15.0


class Console:
    """Prints to the terminal; without one, plain lines for a log file."""

    def __init__(self, iterations: int, to_stderr: bool = False) -> None:
        self._rich = RichConsole(highlight=False, soft_wrap=True, stderr=to_stderr)
        self._iterations = iterations
        self._status: Status | None = None
        self._text = ""
        self._rows = 0
        self._said_seconds = time.monotonic()

    def say(self, text: str) -> None:
        """One plain line."""
        self._rich.print(text, markup=False)
        self._said_seconds = time.monotonic()

    @contextmanager
    def task(self, text: str) -> Iterator[None]:
        """A live line while something runs; without a terminal, one line at its start."""
        raise_if_requested()
        self._text = text
        if not self._rich.is_terminal:
            self.say(f"{text} ...")
            yield
            return
        with self._rich.status(text) as self._status:
            yield
        self._status = None

    @contextmanager
    def phase(self, iteration: int, name: str) -> Iterator[None]:
        """A live line for one phase of an iteration; nothing without a terminal."""
        if not self._rich.is_terminal:
            self._text = f"iteration {iteration}/{self._iterations}  {name}"
            yield
            return
        with self.task(f"iteration {iteration}/{self._iterations}  {name}"):
            yield

    def progress(self, done: int, total: int) -> None:
        """Show how much of the running phase is done; without a terminal, now and then."""
        if self._status is not None:
            self._status.update(f"{self._text}  {done}/{total}")
        elif not self._rich.is_terminal and time.monotonic() - self._said_seconds > _SAY_EVERY_SECONDS:
            self.say(f"{self._text}  {done}/{total}")

    def row(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The iteration's row, under a header that returns now and then."""
        if self._rows % _HEADER_EVERY_ROWS == 0:
            self._rich.print("  ".join(["iteration", *(_header(column) for column in _COLUMNS)]), style="bold")
        self._rows += 1
        cells = [f"{iteration:>9d}", *(_cell(column, metrics) for column in _COLUMNS)]
        self._rich.print("  ".join(cells), markup=False)


def _width(column: tuple[str, str, str]) -> int:
    return max(len(column[0]), int(column[2].split(".")[0].rstrip(",")))


def _header(column: tuple[str, str, str]) -> str:
    return column[0].rjust(_width(column))


def _cell(column: tuple[str, str, str], metrics: Mapping[str, float]) -> str:
    _, name, style = column
    prefix, brace, suffix = name.partition("{dataset}")
    matching = [
        value
        for key, value in metrics.items()
        if key == name or (brace and key.startswith(prefix) and key.endswith(suffix))
    ]
    return (format(matching[0], style) if matching else "").rjust(_width(column))
