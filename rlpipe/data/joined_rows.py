"""Mapped rows of several data sets as one sequence of what is made of them."""

import bisect
import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

from rlpipe.config.data import DatasetConfig
from rlpipe.data.mapped_rows import MappedRows

Item = TypeVar("Item", covariant=True)


class JoinedRows(Sequence[Item]):
    """Rows of data sets, one set after another; what a row becomes is made when it is asked for."""

    def __init__(self, parts: Sequence[tuple[DatasetConfig, MappedRows]]) -> None:
        self.parts = parts
        self._ends = list(itertools.accumulate(len(rows.kept) for _, rows in parts))

    @abstractmethod
    def make(self, dataset: DatasetConfig, rows: MappedRows, position: int) -> Item:
        """What becomes of the row at `position` of `rows`."""

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        position = range(len(self))[index]  # IndexError, and counts from the end
        part = bisect.bisect_right(self._ends, position)
        return self.make(*self.parts[part], position - (self._ends[part - 1] if part else 0))

    def firsts(self) -> Iterator[Item]:
        """The first of each data set that has any."""
        for start, end in itertools.pairwise([0, *self._ends]):
            if start < end:
                yield self[start]
