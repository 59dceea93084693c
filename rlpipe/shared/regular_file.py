"""Opening files that users name or can replace: a pipe in the place of one would be waited for without end."""

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from rlpipe.shared.errors import FileKindError

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path) -> BinaryIO:
    """`path`, to be read. Raises OSError as `open` does, and FileKindError for what is neither file nor folder."""
    return _opened(path, os.O_RDONLY, "rb")


def append_regular(path: Path) -> BinaryIO:
    """`path`, made where there is none, to be written behind its end without a buffer. Raises like `open_regular`."""
    return _opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab", buffering=0)


def read_regular(path: Path) -> bytes:
    """All of the file. Raises like `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def check_regular(paths: Iterable[Path]) -> None:
    """Raise FileKindError where one of `paths` exists and is neither a file nor a folder."""
    for path in paths:
        if path.exists():
            _check_kind(path, path.stat().st_mode)


def _opened(path: Path, flags: int, mode: str, buffering: int = -1) -> BinaryIO:
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a pipe that nobody reads
            _check_kind(path, path.stat().st_mode)
        raise
    try:
        _check_kind(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, mode, buffering)  # type: ignore[return-value]
    except BaseException:
        os.close(descriptor)
        raise


def _check_kind(path: Path, mode: int) -> None:
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise FileKindError(f"{path}: is {kind}, and a file is needed there; put one in its place")
