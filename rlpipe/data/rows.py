"""Rows of a data set, each with its place, so that an error can name file and line."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlpipe.config.data import DatasetConfig
from rlpipe.data.row_checks import row_problem
from rlpipe.data.row_source import Malformed, open_rows, slice_of
from rlpipe.shared.errors import DataError


@dataclass(frozen=True)
class Row:
    """One row. `place` is `file:line`, or `name[index]` where there are no lines."""

    place: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """The rows kept, and how many bad ones were skipped."""

    rows: list[Row]
    skipped: int


def load_rows(dataset: DatasetConfig, skip_bad_rows: bool, with_label: bool = True) -> Rows:
    """Rows of `dataset.path`, as `open_rows` finds them.

    A row that `row_problem` objects to is a DataError that names its place, or is skipped and counted with
    `skip_bad_rows`. `dataset.rows` cuts before that.
    """
    source = open_rows(dataset)
    selected = range(len(source))[slice_of(dataset)]
    kept = []
    skipped = 0
    for place, values, problem in checked(source.read(selected), dataset, with_label):
        if problem is None:
            kept.append(Row(place, values))
        elif skip_bad_rows:
            skipped += 1
        else:
            raise bad_row(place, problem)
    if not kept:
        raise DataError(f"data set {dataset.name!r} ({dataset.path}): no usable row is left of {len(selected)}")
    return Rows(kept, skipped)


def checked(
    rows: Iterator[tuple[str, Any]], dataset: DatasetConfig, with_label: bool
) -> Iterator[tuple[str, Any, str | None]]:
    """(place, values, why the row cannot be used) of each row."""
    for place, values in rows:
        problem = values.problem if isinstance(values, Malformed) else row_problem(values, dataset, with_label)
        yield place, values, problem


def bad_row(place: str, problem: str) -> DataError:
    """The error for the first row that cannot be used."""
    return DataError(f"{place}: {problem}; correct the row, or set data.skip_bad_rows to count and skip it")
