"""The console's table: a row for each iteration, with as many columns as there is width for."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rlpipe.monitoring.durations import duration_text

_GAP = "  "
_ITERATION = "iteration"
_LEFT_WIDTH = 11
_HEADER_EVERY_ROWS = 20
_STEPS_OF_ESTIMATE = 10


@dataclass(frozen=True)
class _Column:
    """`metric` may hold {dataset}, which stands for any. Columns of a low `rank` stay longest. One is empty where there
    is its metric `unless`."""

    header: str
    metric: str
    style: str
    rank: int
    unless: str | None = None

    @property
    def width(self) -> int:
        return max(len(self.header), int(self.style.split(".")[0].strip("z,")))

    def value(self, metrics: Mapping[str, float]) -> float | None:
        if self.unless is not None and _value(self.unless, metrics) is not None:
            return None
        return _value(self.metric, metrics)


def _value(metric: str, metrics: Mapping[str, float]) -> float | None:
    prefix, brace, suffix = metric.partition("{dataset}")
    if not brace:
        return metrics.get(metric)
    return next((metrics[name] for name in metrics if name.startswith(prefix) and name.endswith(suffix)), None)


_COLUMNS = (
    _Column("reward", "rollout/reward_mean", "7.3f", 0),
    _Column("correct", "rollout/accuracy", "7.1%", 4),
    _Column("held-out", "eval/{dataset}/accuracy", "8.1%", 1),
    _Column("held-out", "eval/{dataset}/reward_mean", "8.3f", 1, unless="eval/{dataset}/accuracy"),
    _Column("held-out", "eval/{dataset}/loss", "8.4f", 1),
    _Column("tokens", "rollout/response_tokens_mean", "7,.0f", 6),
    _Column("loss", "train/loss", "z8.4f", 5),
    _Column("grad norm", "train/gradient_norm", "9.3f", 7),
    _Column("mean gap", "mismatch/logprob_abs_mean", "8.1e", 12),
    _Column("rollout s", "time/rollout_seconds", "9.2f", 8),
    _Column("train s", "perf/actor_train_seconds", "7.2f", 9),
    _Column("sync s", "time/weight_sync_seconds", "6.2f", 13),
    _Column("step s", "time/step_seconds", "7.2f", 2),
    _Column("rollout tok/s", "perf/rollout_tokens_per_second", "13,.0f", 10),
    _Column("train tok/s", "perf/actor_tokens_per_second", "11,.0f", 11),
)
_LEFT_RANK = 3  # of the column of the time left, which is always the last


class IterationTable:
    """Makes the lines; prints nothing. A column appears once its metric does, under a header of its own."""

    def __init__(self, iterations: int) -> None:
        self._iterations = iterations
        self._steps: list[float] = []
        self._seen: set[_Column] = set()
        self._shown: list[_Column] | None = None
        self._rows = 0

    def lines(self, iteration: int, metrics: Mapping[str, float], width: int | None) -> tuple[str | None, str]:
        """A header where one is due, and the row. `width` in characters; None is without end."""
        self._seen |= {column for column in _COLUMNS if column.value(metrics) is not None}
        if iteration > 0 and "time/step_seconds" in metrics:
            self._steps.append(metrics["time/step_seconds"])
        shown, with_left = _fitting(self._seen, width)
        header = None
        if shown != self._shown or self._rows % _HEADER_EVERY_ROWS == 0:
            header = _GAP.join([_ITERATION, *(column.header.rjust(column.width) for column in shown)])
            header += _GAP + "left".rjust(_LEFT_WIDTH) if with_left else ""
            self._rows = 0
        self._shown = shown
        self._rows += 1
        cells = [f"{iteration:>{len(_ITERATION)}d}", *(_cell(column, metrics) for column in shown)]
        if with_left:
            cells.append(self.left(iteration).rjust(_LEFT_WIDTH))
        return header, _GAP.join(cells)

    def left(self, iteration: int) -> str:
        """Time until the run's end, seen after `iteration`; empty before a step was timed and at the end."""
        if not self._steps or iteration >= self._iterations:
            return ""
        return duration_text(median(self._steps[-_STEPS_OF_ESTIMATE:]) * (self._iterations - iteration))


def _fitting(seen: Collection[_Column], width: int | None) -> tuple[list[_Column], bool]:
    """Columns that fit, in their order, and whether the time left does."""
    room = float("inf") if width is None else width - len(_ITERATION)
    kept: set[_Column] = set()
    with_left = False
    ranked: Sequence[tuple[int, int, _Column | None]] = sorted(
        [(_LEFT_RANK, _LEFT_WIDTH, None), *((column.rank, column.width, column) for column in seen)],
        key=lambda entry: entry[0],
    )
    for _, cell_width, column in ranked:
        room -= len(_GAP) + cell_width
        if room < 0:
            break
        if column is None:
            with_left = True
        else:
            kept.add(column)
    return [column for column in _COLUMNS if column in kept], with_left


def _cell(column: _Column, metrics: Mapping[str, float]) -> str:
    value = column.value(metrics)
    return ("" if value is None else format(value, column.style)).rjust(column.width)
