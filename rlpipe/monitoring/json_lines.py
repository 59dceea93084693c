"""Files of rows, one JSON object a line, that a crash may have left in any state."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from rlpipe.shared.atomic_file import replacing
from rlpipe.shared.disk_errors import FULL, append_whole
from rlpipe.shared.errors import DiskFullError
from rlpipe.shared.regular_file import append_regular, open_regular

_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class JsonRows:
    """The rows of a file, and how many lines are none: torn by a crash, or damaged."""

    rows: tuple[dict[str, Any], ...] = ()
    damaged: int = 0


def append_json_line(path: Path, row: dict[str, Any]) -> None:
    """Append one row, whole or not at all. Raises DiskFullError, and FileKindError for what is no file."""
    # A lone surrogate becomes its JSON escape.
    line = (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", errors="backslashreplace")
    with append_regular(path) as file:
        try:
            append_whole(file, line)
        except OSError as error:
            if error.errno in FULL:
                raise DiskFullError(f"{path}: a row cannot be written ({error.strerror}): free space there") from None
            raise


def read_json_lines(path: Path) -> JsonRows:
    """All rows of a file; none when it does not exist."""
    rows, damaged = [], 0
    for _, row in _lines(path):
        if row is None:
            damaged += 1
        else:
            rows.append(row)
    return JsonRows(tuple(rows), damaged)


def read_ends(path: Path, first: int, last: int) -> JsonRows:
    """The first and the last lines of a file that may be larger than memory; of damaged ones those among them."""
    try:
        with open_regular(path) as file:
            begin = list(islice((line for line in file if line.strip()), first))
            lines = begin + _last_lines(file, last)
    except FileNotFoundError:
        return JsonRows()
    rows = list(map(_parsed, lines))
    return JsonRows(tuple(row for row in rows if row is not None), rows.count(None))


def drop_rows_from(path: Path, iteration: int) -> list[str]:
    """Remove the rows of `iteration` and later, which a resumed run makes again, and what is no row.

    Returns a sentence for the user where lines were no rows. A kill leaves the old file or the new one, whole. The file
    may be larger than memory.
    """

    def stays(row: Mapping[str, Any] | None) -> bool:
        return row is not None and isinstance(at := row.get("iteration"), int) and at < iteration

    if not path.exists():
        return []
    kept_bytes = _bytes_before(path, stays)
    if kept_bytes is not None:
        if kept_bytes < path.stat().st_size:
            with path.open("r+b") as whole:
                whole.truncate(kept_bytes)
                os.fsync(whole.fileno())
        return []
    damaged = 0
    with replacing(path) as file:
        for line, row in _lines(path):
            if stays(row):
                file.write(line.rstrip(b"\n") + b"\n")
            damaged += row is None or not isinstance(row.get("iteration"), int)
    return [f"warning: {path}: {damaged} damaged line{'s were' if damaged > 1 else ' was'} removed"] if damaged else []


def _bytes_before(path: Path, stays: Callable[[Mapping[str, Any]], bool]) -> int | None:
    """Up to the rows that go, where these are the last ones and each line is a whole row; None for other files."""
    place, kept = 0, 0
    with open_regular(path) as file:
        for line in file:
            row = _parsed(line)
            if row is None or not isinstance(row.get("iteration"), int) or not line.endswith(b"\n"):
                return None
            before, place = place, place + len(line)
            if stays(row):
                if kept < before:
                    return None
                kept = place
    return kept


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each line that is not blank, and its row."""
    try:
        with open_regular(path) as file:
            for line in file:
                if line.strip():
                    yield line, _parsed(line)
    except FileNotFoundError:
        return


def _last_lines(file: BinaryIO, count: int) -> list[bytes]:
    """Of those behind the place where `file` is read."""
    begin, end = file.tell(), file.seek(0, os.SEEK_END)
    text, whole = b"", 0
    while end > begin and whole < count:
        start = max(begin, end - _BLOCK_BYTES)
        file.seek(start)
        text, end = file.read(end - start) + text, start
        whole = sum(bool(line.strip()) for line in text.split(b"\n")[1:])  # the first one may have begun before
    return [line for line in text.split(b"\n") if line.strip()][-count:]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
