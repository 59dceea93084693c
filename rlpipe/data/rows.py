"""Rows of a data set, each with its place, so that an error can name file and line."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.config.data import DatasetConfig
from rlpipe.data.row_checks import MAX_ROW_BYTES, row_problem
from rlpipe.shared.errors import DataError
from rlpipe.shared.strict_json import StrictJsonError, parse_json

_SUFFIXES = (".jsonl", ".json", ".parquet")
_SPLIT_FILE = re.compile(r"(train|training|test|testing|val|valid|validation|dev|eval|evaluation)(?=$|[-_.\d])")


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


@dataclass(frozen=True)
class Malformed:
    """What stands in the place of a row that cannot be parsed."""

    problem: str


def load_rows(dataset: DatasetConfig, skip_bad_rows: bool, with_label: bool = True) -> Rows:
    """Rows of `dataset.path`: a .jsonl, .json or .parquet file, a folder of such files, or a hub data set.

    A row that `row_problem` objects to is a DataError that names its place, or is skipped and counted with
    `skip_bad_rows`. `dataset.rows` cuts before that.
    """
    selected = list(_read(dataset))[_parse_slice(dataset)]
    kept = []
    skipped = 0
    for place, values in selected:
        problem = values.problem if isinstance(values, Malformed) else row_problem(values, dataset, with_label)
        if problem is None:
            kept.append(Row(place, values))
        elif skip_bad_rows:
            skipped += 1
        else:
            raise DataError(f"{place}: {problem}; correct the row, or set data.skip_bad_rows to count and skip it")
    if not kept:
        raise DataError(f"data set {dataset.name!r} ({dataset.path}): no usable row is left of {len(selected)}")
    return Rows(kept, skipped)


def _read(dataset: DatasetConfig) -> Iterator[tuple[str, Any]]:
    path = Path(dataset.path)
    try:
        if path.is_dir():
            yield from (row for file in _files_of_split(path, dataset.split) for row in _read_file(file))
        elif path.exists():
            if dataset.split != "train":
                raise DataError(f"{path}: split {dataset.split!r} says nothing about a single file; remove it")
            yield from _read_file(path)
        elif path.suffix in _SUFFIXES or path.is_absolute() or dataset.path.startswith("."):
            raise DataError(f"{path}: no such file (data set {dataset.name!r}); correct its `path`")
        else:
            yield from _read_hub(dataset)
    except OSError as error:
        shown = dataset.path if len(dataset.path) < 200 else f"{dataset.path[:200]}..."
        raise DataError(f"{shown}: cannot be read ({error.strerror or error}); correct `path` or its rights") from None


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """Files named after `split`; all of them where none is named after any split."""
    files = sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES)
    if not files:
        raise DataError(f"{folder}: the folder holds no .jsonl, .json or .parquet file")
    own = re.compile(rf"{re.escape(split)}(?=$|[-_.\d])")
    chosen = [file for file in files if own.match(file.stem)]
    if chosen:
        return chosen
    named = sorted({match[0] for file in files if (match := _SPLIT_FILE.match(file.stem))})
    if named or split != "train":
        raise DataError(
            f"{folder}: no file of split {split!r}; the folder holds {', '.join(file.name for file in files[:6])}: set "
            "`split` to the beginning of a file's name, or `path` to a file; `rows` cuts"
        )
    return files


def _read_file(path: Path) -> Iterator[tuple[str, Any]]:
    if not path.is_file():
        raise DataError(f"{path}: is not a regular file; move it elsewhere, or correct `path`")
    if path.suffix == ".jsonl":
        return _read_json_lines(path)
    if path.suffix == ".json":
        return _read_json(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise DataError(
        f"{path}: files of type {path.suffix or 'without suffix'} are not read; use .jsonl, .json or .parquet"
    )


def _read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        lines = iter(lambda: file.readline(MAX_ROW_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            place = f"{path}:{number}"
            if len(line) > MAX_ROW_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_ROW_BYTES)
                yield place, Malformed(f"the row has more than {MAX_ROW_BYTES:,} bytes")
            elif line.strip():
                yield place, _parsed(line)


def _parsed(line: bytes) -> Any:
    try:
        return parse_json(line)
    except StrictJsonError as error:
        return Malformed(str(error))


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    values = _parsed(path.read_bytes())
    if isinstance(values, Malformed):
        raise DataError(f"{path}: {values.problem}; correct the file")
    if not isinstance(values, list):
        raise DataError(f"{path}: holds {type(values).__name__}; a list of objects is needed")
    yield from ((f"{path}[{index}]", value) for index, value in enumerate(values))


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    from datasets import Dataset

    try:
        rows = list(Dataset.from_parquet(str(path), keep_in_memory=True))
    except Exception as error:  # pyarrow and datasets raise many unrelated types for damaged files
        raise DataError(f"{path}: not a readable parquet file: {_first_line(error)}") from None
    yield from ((f"{path}[{index}]", value) for index, value in enumerate(rows))


def _read_hub(dataset: DatasetConfig) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset

    try:
        rows = list(load_dataset(dataset.path, split=dataset.split))
    except Exception as error:  # as many types as there are ways to store, to find and to fetch a data set
        raise DataError(
            f"data set {dataset.path[:200]!r}: no such file, and the hub could not give it: {_first_line(error)}"
        ) from None
    yield from ((f"{dataset.path}/{dataset.split}[{index}]", value) for index, value in enumerate(rows))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _parse_slice(dataset: DatasetConfig) -> slice:
    start, _, stop = (dataset.rows or ":").partition(":")
    return slice(int(start) if start else None, int(stop) if stop else None)
