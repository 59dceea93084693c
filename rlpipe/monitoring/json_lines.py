"""Files of rows, one JSON object a line, that a crash may have left in any state."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.shared.atomic_file import write_atomically
from rlpipe.shared.disk_errors import FULL, append_whole
from rlpipe.shared.errors import DiskFullError
from rlpipe.shared.regular_file import append_regular, read_regular


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
    try:
        lines = read_regular(path).split(b"\n")
    except FileNotFoundError:
        return JsonRows()
    rows, damaged = [], 0
    for line in lines:
        if line.strip():
            row = _parsed(line)
            damaged += row is None
            rows += [] if row is None else [row]
    return JsonRows(tuple(rows), damaged)


def drop_rows_from(path: Path, iteration: int) -> list[str]:
    """Remove the rows of `iteration` and later, which a resumed run makes again, and what is no row.

    Returns a sentence for the user where lines were no rows. A kill leaves the old file or the new one, whole.
    """
    if not path.exists():
        return []
    found = read_json_lines(path)
    kept = [row for row in found.rows if isinstance(at := row.get("iteration"), int) and at < iteration]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
    write_atomically(path, text.encode("utf-8", errors="backslashreplace"))
    damaged = found.damaged + sum(not isinstance(row.get("iteration"), int) for row in found.rows)
    return [f"warning: {path}: {damaged} damaged line{'s were' if damaged > 1 else ' was'} removed"] if damaged else []


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
