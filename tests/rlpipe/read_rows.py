"""Rows of a data set in one list, for tests of how they are found and checked."""

from typing import NamedTuple

from rlpipe.config.data import DatasetConfig
from rlpipe.data.row_source import open_rows, slice_of
from rlpipe.data.rows import Row, bad_row, checked


class Rows(NamedTuple):
    """The rows kept, and how many bad ones were skipped."""

    rows: list[Row]
    skipped: int


def load_rows(dataset: DatasetConfig, skip_bad_rows: bool) -> Rows:
    """As they are mapped, without the tokens. Raises DataError for a bad row that is not to be skipped."""
    source = open_rows(dataset)
    kept, skipped = [], 0
    for place, values, problem in checked(source.read(range(len(source))[slice_of(dataset)]), dataset, with_label=True):
        if problem is None:
            kept.append(Row(place, values))
        elif skip_bad_rows:
            skipped += 1
        else:
            raise bad_row(place, problem)
    return Rows(kept, skipped)
