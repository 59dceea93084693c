"""What a run's folder tells: metrics of each iteration, a few samples, the configuration."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.monitoring.run_directory import RunDirectory, read_json_lines
from rlpipe.shared.errors import DataError

Series = tuple[list[int], list[float]]


@dataclass(frozen=True)
class History:
    """Rows in order of iteration; row 0, where it exists, is the evaluation before training.

    ranks: each training process in each iteration. jit_events: what compiled where.
    """

    name: str
    rows: tuple[dict[str, Any], ...]
    samples: tuple[dict[str, Any], ...]
    config_yaml: str
    ranks: tuple[dict[str, Any], ...] = ()
    jit_events: tuple[dict[str, Any], ...] = ()

    def series(self, metric: str) -> Series:
        """Iterations and values of a metric, where it was logged."""
        found = [(row["iteration"], row[metric]) for row in self.rows if metric in row]
        return [iteration for iteration, _ in found], [value for _, value in found]

    def names(self, prefix: str, suffix: str = "") -> list[str]:
        """Names of all metrics that begin and end so, in order of appearance."""
        found: dict[str, None] = {}
        for row in self.rows:
            found.update({name: None for name in row if name.startswith(prefix) and name.endswith(suffix)})
        return list(found)

    @property
    def trained(self) -> tuple[dict[str, Any], ...]:
        """Rows of training iterations."""
        return tuple(row for row in self.rows if row["iteration"] > 0)


def read_history(folder: Path) -> History:
    """Raises DataError when `folder` holds no run, or one without a finished iteration."""
    directory = RunDirectory(folder)
    if not directory.config.exists():
        raise DataError(f"{folder}: no run here (config.yaml is missing); give the folder of a run")
    rows = read_json_lines(directory.metrics)
    if not rows:
        raise DataError(f"{folder}: the run has no finished iteration yet")
    samples = read_json_lines(directory.samples)
    return History(
        folder.name,
        tuple(rows),
        tuple(samples),
        directory.config.read_text(),
        tuple(read_json_lines(directory.ranks)),
        tuple(read_json_lines(directory.jit_events)),
    )
