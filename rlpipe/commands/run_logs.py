"""The logs of a run's workers, their last lines or as they grow."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.errors import DataError
from rlpipe.shared.regular_file import open_regular

_LOOK_EVERY_SECONDS = 0.5


def run_logs(folder: Path, names: Sequence[str], lines: int, follow: bool) -> Iterator[str]:
    """The last `lines` of each log whose name holds one of `names`, or of all; then, with `follow`, what is added until
    the caller stops. Lines of several logs begin with the log's name. Raises DataError where nothing matches."""
    logs = _matching(folder, names)
    places: dict[Path, int] = {}
    for path in logs:
        last, places[path] = _last_lines(path, lines, follow)
        yield from (_marked(path, line, len(logs) > 1) for line in last)
    while follow:
        time.sleep(_LOOK_EVERY_SECONDS)
        for path in _matching(folder, names):
            added, places[path] = _added_lines(path, places.get(path, 0))
            yield from (_marked(path, line, len(places) > 1) for line in added)


def _matching(folder: Path, names: Sequence[str]) -> list[Path]:
    directory = RunDirectory(folder).logs
    there = sorted(path for path in directory.glob("*") if path.suffix in (".log", ".jsonl"))
    found = [path for path in there if not names or any(name in path.name for name in names)]
    if not there:
        raise DataError(f"{directory}: no logs here; give the folder of a run that has started")
    if not found:
        has = ", ".join(path.name for path in there)
        raise DataError(f"{directory}: no log {' or '.join(names)}; there are: {has}")
    return found


def _last_lines(path: Path, lines: int, whole: bool) -> tuple[list[str], int]:
    """The lines, and where the next begin; `whole`: a last one that is not written to its end is among those."""
    with open_regular(path) as file:
        last = deque(file, maxlen=lines)
        begun = last.pop() if whole and last and not last[-1].endswith(b"\n") else b""
        return [_text(line) for line in last], file.tell() - len(begun)


def _added_lines(path: Path, place: int) -> tuple[list[str], int]:
    """Whole lines after `place`, and where the next begin. A file that became shorter was begun anew."""
    with open_regular(path) as file:
        size = path.stat().st_size
        file.seek(place if place <= size else 0)
        start = file.tell()
        whole, newline, _ = file.read().rpartition(b"\n")
    return [_text(line) for line in whole.split(b"\n")] if newline else [], start + len(whole) + len(newline)


def _marked(path: Path, line: str, several: bool) -> str:
    return f"{path.stem}: {line}" if several else line


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r\n")
