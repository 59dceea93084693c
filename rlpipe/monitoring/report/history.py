"""What a run's folder tells: metrics of each iteration, a few samples, the configuration."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from sys import intern
from typing import Any

from rlpipe.monitoring.json_lines import JsonRows, read_ends, read_json_lines
from rlpipe.monitoring.response_record import ResponseRecord, read_record
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.errors import DataError

Series = tuple[list[int], list[float]]
_LAST_ITERATION = 10**9
_LARGEST = 1e100  # sums and differences of such numbers stay finite
_SHOWN = 5
_LEAST_ROWS = 256
SHOWN_SAMPLES, SHOWN_EPISODES = (2, 6), (2, 8)
"""The first ones and the last ones: a file of them may be larger than memory."""


@dataclass(frozen=True)
class History:
    """Rows in order of iteration; row 0, where it exists, is the evaluation before training.

    All metrics are finite numbers. samples, episodes: the first ones and the last ones. ranks: each training process in
    the last iteration. jit_events: what compiled where. responses: their lengths. notes: sentences about what is in the
    files and not here.
    """

    name: str
    rows: tuple[dict[str, Any], ...]
    samples: tuple[dict[str, Any], ...]
    config_yaml: str
    episodes: tuple[dict[str, Any], ...] = ()
    ranks: tuple[dict[str, Any], ...] = ()
    jit_events: tuple[dict[str, Any], ...] = ()
    responses: tuple[ResponseRecord, ...] = ()
    notes: tuple[str, ...] = ()

    def series(self, metric: str) -> Series:
        """Iterations and values of a metric, where it was logged."""
        found = [(row["iteration"], row[metric]) for row in self.rows if metric in row]
        return [iteration for iteration, _ in found], [value for _, value in found]

    def names(self, prefix: str, suffix: str = "") -> list[str]:
        """Names of all metrics that begin and end so, in order of appearance."""
        return [name for name in self._names if name.startswith(prefix) and name.endswith(suffix)]

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for row in self.rows for name in row))

    @cached_property
    def trained(self) -> tuple[dict[str, Any], ...]:
        """Rows of training iterations."""
        return tuple(row for row in self.rows if row["iteration"] > 0)


def read_history(folder: Path) -> History:
    """Raises DataError when `folder` holds no run, or one without a finished iteration."""
    directory = RunDirectory(folder)
    if not directory.config.is_file():
        raise DataError(f"{folder}: no run here (config.yaml is missing); give the folder of a run")
    reader = _Reader()
    rows = reader.rows(directory.metrics, lambda row: True)
    rows = sorted((reader.finite(row) for row in rows), key=lambda row: row["iteration"])
    if not rows:
        raise DataError("; ".join([f"{folder}: the run has no finished iteration yet", *reader.notes()]))
    return History(
        name=_printable(folder.resolve().name),
        rows=tuple(rows),
        samples=tuple(reader.ends(directory.samples, *SHOWN_SAMPLES)),
        episodes=tuple(reader.ends(directory.episodes, *SHOWN_EPISODES)),
        config_yaml=directory.config.read_text(encoding="utf-8", errors="replace"),
        ranks=tuple(reader.last_iteration(directory.ranks, _is_rank)),
        jit_events=tuple(filter(_is_event, reader.rows(directory.jit_events, _is_event_or_compiler))),
        responses=tuple(filter(None, map(read_record, reader.rows(directory.responses, _is_record)))),
        notes=tuple(reader.notes()),
    )


class _Reader:
    """Leaves out what is damaged, and remembers it."""

    def __init__(self) -> None:
        self._damaged: dict[str, int] = {}
        self._not_finite: dict[str, list[int]] = defaultdict(list)

    def rows(self, path: Path, is_whole: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, Any]]:
        return self._kept(path, read_json_lines(path), is_whole)

    def _kept(self, path: Path, found: JsonRows, is_whole: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, Any]]:
        kept = [row for row in found.rows if _is_iteration(row.get("iteration")) and is_whole(row)]
        if damaged := found.damaged + len(found.rows) - len(kept):
            self._damaged[path.name] = damaged
        return kept

    def ends(self, path: Path, first: int, last: int) -> list[dict[str, Any]]:
        return self._kept(path, read_ends(path, first, last), lambda row: True)

    def last_iteration(self, path: Path, is_whole: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, Any]]:
        """Rows of the newest iteration, of which a file may have thousands in each."""
        last = _LEAST_ROWS
        while True:
            rows = self._kept(path, found := read_ends(path, 0, last), is_whole)
            newest = [row for row in rows if row["iteration"] == rows[-1]["iteration"]]
            if len(newest) < len(rows) or len(found.rows) + found.damaged < last:
                return newest
            last *= 2

    def finite(self, row: Mapping[str, Any]) -> dict[str, Any]:
        kept = {intern(name): value for name, value in row.items() if _is_finite(value)}
        for name in row.keys() - kept.keys():
            self._not_finite[name].append(row["iteration"])
        return kept

    def notes(self) -> Iterator[str]:
        for name, count in self._damaged.items():
            yield f"{name}: {count} damaged line{'s are' if count > 1 else ' is'} left out."
        for name, iterations in sorted(self._not_finite.items()):
            where = ", ".join(map(str, iterations[:_SHOWN])) + (", ..." if len(iterations) > _SHOWN else "")
            yield f"{_printable(name)[:80]} is no finite number in iteration {where}; it is left out there."


def _is_iteration(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LAST_ITERATION


def _is_finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and not (isinstance(value, float) and math.isnan(value)) and abs(value) < _LARGEST


def _is_rank(row: Mapping[str, Any]) -> bool:
    seconds = row.get("seconds")
    texts = all(isinstance(row.get(name), str) for name in ("name", "host"))
    return texts and isinstance(seconds, dict) and all(map(_is_finite, seconds.values()))


def _is_event(row: Mapping[str, Any]) -> bool:
    texts = all(isinstance(row.get(name), str) for name in ("kind", "name"))
    return texts and _is_finite(row.get("seconds")) and isinstance(row.get("compiled"), bool)


def _is_event_or_compiler(row: Mapping[str, Any]) -> bool:
    """Compilers without a hook are on lines of their own, of which the report tells nothing."""
    return _is_event(row) or row.get("kind") == "compiler process"


def _is_record(row: Mapping[str, Any]) -> bool:
    return read_record(row) is not None


def _printable(text: str) -> str:
    """With what is no character replaced: names of files and of metrics can hold halves of one."""
    return text.encode("utf-8", errors="replace").decode()
