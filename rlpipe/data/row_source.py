"""Where rows lie, without holding them: what a process needs to read any of them, each with its place."""

import itertools
import logging
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlpipe.config.data import DatasetConfig
from rlpipe.data.row_checks import MAX_ROW_BYTES
from rlpipe.data.row_files import files_of
from rlpipe.shared.errors import DataError
from rlpipe.shared.strict_json import StrictJsonError, parse_json

_SMALL_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Malformed:
    """What stands in the place of a row that cannot be parsed."""

    problem: str


class RowSource(Protocol):
    """Rows that processes can read side by side. Values are a row's columns, `Malformed`, or whatever is not a row."""

    def __len__(self) -> int: ...

    def read(self, rows: Sequence[int]) -> Iterator[tuple[str, Any]]:
        """(place, values) of each of `rows`, which rise."""
        raise NotImplementedError


class JsonLines:
    """The lines of a .jsonl file that are not blank."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, self._numbers = array("q"), array("q")
        with path.open("rb") as file:
            number = start = 0
            while line := file.readline(MAX_ROW_BYTES):
                number += 1
                if line.strip():
                    self._starts.append(start)
                    self._numbers.append(number)
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_ROW_BYTES)
                start = file.tell()

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, rows: Sequence[int]) -> Iterator[tuple[str, Any]]:
        with self._path.open("rb") as file:
            for row in rows:
                file.seek(self._starts[row])
                line = file.readline(MAX_ROW_BYTES + 1)
                too_long = len(line) > MAX_ROW_BYTES
                values = Malformed(f"the row has more than {MAX_ROW_BYTES:,} bytes") if too_long else _parsed(line)
                yield f"{self._path}:{self._numbers[row]}", values


class Table:
    """Rows that can be taken by their number: a memory-mapped data set, or a list. `name` stands in their places."""

    def __init__(self, name: str, values: Any) -> None:
        self._name = name
        self._values = values
        self.fingerprint = str(getattr(values, "_fingerprint", ""))

    def __len__(self) -> int:
        return len(self._values)

    def read(self, rows: Sequence[int]) -> Iterator[tuple[str, Any]]:
        for row in rows:
            try:
                values = self._values[int(row)]
            except UnicodeDecodeError as error:
                values = Malformed(f"a text is not valid UTF-8 at byte {error.start}")
            yield f"{self._name}[{row}]", values


class Joined:
    """Several sources one after another."""

    def __init__(self, parts: Sequence[RowSource]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, rows: Sequence[int]) -> Iterator[tuple[str, Any]]:
        start = 0
        for part, end in zip(self._parts, self._ends, strict=True):
            mine = [row - start for row in rows if start <= row < end]
            if mine:
                yield from part.read(mine)
            start = end


def open_rows(dataset: DatasetConfig) -> RowSource:
    """The rows of `dataset.path`: a .jsonl, .json or .parquet file, a folder of such files, one that `datasets` saved,
    or a hub data set."""
    files = None if dataset.streaming else files_of(dataset)
    try:
        if files is not None:
            return Joined([_open_file(file) for file in files])
        return _streamed(dataset) if dataset.streaming else _open_hub(dataset)
    except OSError as error:
        shown = dataset.path if len(dataset.path) < 200 else f"{dataset.path[:200]}..."
        raise DataError(f"{shown}: cannot be read ({error.strerror or error}); correct `path` or its rights") from None


def slice_of(dataset: DatasetConfig) -> slice:
    """What `dataset.rows` keeps."""
    start, _, stop = (dataset.rows or ":").partition(":")
    return slice(int(start) if start else None, int(stop) if stop else None)


def _open_file(path: Path) -> RowSource:
    if not path.is_file():
        raise DataError(f"{path}: is not a regular file; move it elsewhere, or correct `path`")
    if path.suffix == ".jsonl":
        return JsonLines(path)
    if path.suffix == ".json":
        return Table(str(path), _json_list(path))
    if path.suffix == ".parquet":
        return Table(str(path), _parquet(path))
    if path.suffix == ".arrow":
        return Table(str(path), _arrow(path))
    raise DataError(
        f"{path}: files of type {path.suffix or 'without suffix'} are not read; use .jsonl, .json or .parquet"
    )


def _parsed(line: bytes) -> Any:
    try:
        return parse_json(line)
    except StrictJsonError as error:
        return Malformed(str(error))


def _json_list(path: Path) -> list[Any]:
    values = _parsed(path.read_bytes())
    if isinstance(values, Malformed):
        raise DataError(f"{path}: {values.problem}; correct the file")
    if not isinstance(values, list):
        raise DataError(f"{path}: holds {type(values).__name__}; a list of objects is needed")
    return values


def _parquet(path: Path) -> Any:
    """A large file is converted once, to one that is memory-mapped, in the cache of `datasets`."""
    from datasets import Dataset
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            if file.metadata.num_rows == 0:
                return []
        with _without_log("datasets"):  # it writes what it raises
            return Dataset.from_parquet(str(path), keep_in_memory=path.stat().st_size < _SMALL_BYTES)
    except Exception as error:  # pyarrow and datasets raise many unrelated types for damaged files
        raise DataError(f"{path}: not a readable parquet file: {first_line(_first_cause(error))}") from None


def _arrow(path: Path) -> Any:
    """A table that `datasets` saved is memory-mapped as it is."""
    from datasets import Dataset

    try:
        return Dataset.from_file(str(path))
    except Exception as error:  # as for parquet
        raise DataError(f"{path}: not a readable arrow file: {first_line(error)}") from None


def _open_hub(dataset: DatasetConfig) -> RowSource:
    from datasets import load_dataset

    path, _, revision = dataset.path.partition("@")
    try:
        table = load_dataset(path, dataset.subset, split=dataset.split, revision=revision or None)
    except Exception as error:  # as many types as there are ways to store, to find and to fetch a data set
        raise _no_hub(dataset, error) from None
    return Table(f"{dataset.path}/{dataset.split}", table)


def _streamed(dataset: DatasetConfig) -> RowSource:
    """The first rows of a data set that is never downloaded whole, as many as `rows` asks for."""
    from datasets import load_dataset

    path, _, revision = dataset.path.partition("@")
    try:
        stream = load_dataset(path, dataset.subset, split=dataset.split, revision=revision or None, streaming=True)
        rows = list(itertools.islice(stream, slice_of(dataset).stop))
    except Exception as error:  # as for a data set that is downloaded
        raise _no_hub(dataset, error) from None
    return Table(f"{dataset.path}/{dataset.split}", rows)


def _no_hub(dataset: DatasetConfig, error: Exception) -> DataError:
    if subsets := re.search(r"available configs: (\[.*?\])", str(error)):
        return DataError(
            f"data set {dataset.path[:200]!r} has several subsets: set `subset` to one of {subsets[1][:1000]}"
        )
    return DataError(
        f"data set {dataset.path[:200]!r}: no such file, and the hub could not give it: {first_line(error)}"
    )


@contextmanager
def _without_log(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _first_cause(error: BaseException) -> BaseException:
    """What made a library say that something failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def first_line(error: BaseException) -> str:
    """What an error of a library says, in one line; the second, too, where the first only announces it."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {others[0].strip()}"[:300] if first.endswith(":") and others else first[:300]
