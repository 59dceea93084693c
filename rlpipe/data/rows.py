"""Rows of a data set, each with its place, so that an error can name file and line."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.config.data import DatasetConfig
from rlpipe.shared.errors import ConfigError, DataError

_SUFFIXES = (".jsonl", ".json", ".parquet")


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


def load_rows(dataset: DatasetConfig, skip_bad_rows: bool) -> Rows:
    """Rows of `dataset.path`: a .jsonl, .json or .parquet file, a folder of such files, or a hub data set.

    A row that is not a JSON object or lacks the prompt or label column is a DataError that names its place, or is
    skipped and counted with `skip_bad_rows`. `dataset.rows` cuts before that.
    """
    places = _read(dataset)
    selected = list(places)[_parse_slice(dataset)]
    kept = []
    skipped = 0
    for place, values in selected:
        problem = _problem(values, dataset)
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
    if path.is_file():
        return _read_file(path)
    if path.is_dir():
        files = sorted(
            file for file in path.iterdir() if file.suffix in _SUFFIXES and file.stem.startswith(dataset.split)
        )
        files = files or sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        if not files:
            raise DataError(f"{path}: the folder holds no .jsonl, .json or .parquet file")
        return (row for file in files for row in _read_file(file))
    if path.suffix in _SUFFIXES or path.is_absolute() or dataset.path.startswith("."):
        raise DataError(f"{path}: no such file (data set {dataset.name!r}); correct its `path`")
    return _read_hub(dataset)


def _read_file(path: Path) -> Iterator[tuple[str, Any]]:
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
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}:{number}", _parse_json(line)


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        return error


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    values = _parse_json(path.read_text(encoding="utf-8", errors="replace"))
    if isinstance(values, json.JSONDecodeError):
        raise DataError(f"{path}:{values.lineno}: not valid JSON: {values.msg}")
    if not isinstance(values, list):
        raise DataError(f"{path}: holds {type(values).__name__}; a list of objects is needed")
    yield from ((f"{path}[{index}]", value) for index, value in enumerate(values))


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    from datasets import Dataset
    from pyarrow import ArrowException

    try:
        table = Dataset.from_parquet(str(path), keep_in_memory=True)
    except (ArrowException, ValueError, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from None
    yield from ((f"{path}[{index}]", value) for index, value in enumerate(table))


def _read_hub(dataset: DatasetConfig) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset

    try:
        table = load_dataset(dataset.path, split=dataset.split)
    except (ValueError, OSError) as error:
        first = str(error).splitlines()[0]
        raise DataError(f"data set {dataset.path!r}: no such file, and the hub could not give it: {first}") from None
    yield from ((f"{dataset.path}/{dataset.split}[{index}]", value) for index, value in enumerate(table))


def _problem(values: Any, dataset: DatasetConfig) -> str | None:
    if isinstance(values, json.JSONDecodeError):
        return f"not valid JSON: {values.msg} at column {values.colno}"
    if not isinstance(values, Mapping):
        return f"a JSON object is needed, but this is {type(values).__name__}"
    for role, column in (("prompt", dataset.prompt_column), ("label", dataset.label_column)):
        if values.get(column) in (None, "", []):
            return (
                f"column {column!r} (data set {dataset.name!r}, {role}) is missing or empty; columns: {sorted(values)}"
            )
    return None


def _parse_slice(dataset: DatasetConfig) -> slice:
    if dataset.rows is None:
        return slice(None)
    start, colon, stop = dataset.rows.partition(":")
    try:
        if not colon:
            raise ValueError
        return slice(int(start) if start else None, int(stop) if stop else None)
    except ValueError:
        raise ConfigError(
            f"data set {dataset.name!r}: rows is {dataset.rows!r} but must be start:stop, for instance 0:100"
        ) from None
