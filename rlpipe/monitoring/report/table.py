"""The row by which training systems are compared: for each iteration, over a window, and for the whole run."""

from collections.abc import Sequence
from typing import Any

from rlpipe.monitoring.report.history import History
from rlpipe.shared.errors import DataError

Row = dict[str, Any]

_SECONDS = "perf/actor_train_seconds"
# Header, metric, format, and the metric by which rates are weighted; sums of seconds become means an iteration.
_COLUMNS = (
    ("rollout tok/s/GPU", "perf/rollout_tokens_per_gpu_per_second", ",.1f", "perf/rollout_seconds"),
    ("ref logprob s", "time/ref_logprob_seconds", ".3f", None),
    ("actor train s", _SECONDS, ".3f", None),
    ("train s", "perf/train_seconds", ".3f", None),
    ("step s", "time/step_seconds", ".3f", None),
    ("tok/s/GPU", "perf/tokens_per_gpu_per_second", ",.1f", "time/step_seconds"),
    ("actor tok/s", "perf/actor_tokens_per_second", ",.1f", _SECONDS),
    ("actor tok/s/GPU", "perf/actor_tokens_per_gpu_per_second", ",.1f", _SECONDS),
    ("TFLOPS/GPU", "perf/actor_train_tflops_per_gpu", ".4g", _SECONDS),
    ("MFU", "perf/actor_train_mfu", ".1%", _SECONDS),
    ("HFU", "perf/actor_train_hfu", ".1%", _SECONDS),
)


def performance_rows(history: History, skip_until: int = 1, window: int = 10) -> list[tuple[str, Row]]:
    """(label, value by header) of each trained iteration, then of the last `window` iterations, then of all of them.

    Iterations up to `skip_until` are warm-up: shown in brackets, and left out of the last two rows. A rate over several
    iterations is what was done over the seconds it took, not a mean of rates; seconds are means. DataError if
    nothing is left.
    """
    counted = [row for row in history.trained if row["iteration"] > skip_until]
    if not counted:
        raise DataError(
            f"{history.name}: no iteration after {skip_until}, the last one that counts as warm-up; lower --skip"
        )
    labels = [(f"[{n}]" if (n := row["iteration"]) <= skip_until else str(n), row) for row in history.trained]
    last = counted[-window:]
    rows = [(label, _combined([row])) for label, row in labels]
    rows.append((f"last {len(last)}", _combined(last)))
    rows.append((f"all {len(counted)}", _combined(counted)))
    return rows


def performance_table(history: History, skip_until: int = 1, window: int = 10) -> str:
    """The rows as text with aligned columns. A value that is not known is a dash."""
    header = ["iteration", *(column[0] for column in _COLUMNS)]
    lines = [header, *([label, *_cells(row)] for label, row in performance_rows(history, skip_until, window))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def table_headers() -> list[str]:
    return [column[0] for column in _COLUMNS]


def _combined(rows: Sequence[Row]) -> Row:
    return {header: _value(rows, metric, weight) for header, metric, _, weight in _COLUMNS}


def _value(rows: Sequence[Row], metric: str, weight: str | None) -> float | None:
    """Weighted with seconds, a rate becomes work over time."""
    found = [row for row in rows if metric in row and (weight is None or row.get(weight))]
    weights = [1.0 if weight is None else float(row[weight]) for row in found]
    if not found or not sum(weights):
        return None
    return sum(float(row[metric]) * share for row, share in zip(found, weights, strict=True)) / sum(weights)


def _cells(row: Row) -> list[str]:
    return ["-" if row[header] is None else format(row[header], style) for header, _, style, _ in _COLUMNS]
