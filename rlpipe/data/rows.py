"""Rows of a data set, each with its place, so that an error can name file and line."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlpipe.config.data import DatasetConfig
from rlpipe.data.row_checks import row_problem
from rlpipe.data.row_source import Malformed
from rlpipe.shared.errors import DataError


@dataclass(frozen=True)
class Row:
    """One row. `place` is `file:line`, or `name[index]` where there are no lines."""

    place: str
    values: Mapping[str, Any]


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
