"""A full disk: one sentence where a folder of many files is written, and no failure where notes of a worker are."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rlpipe.shared.errors import DiskFullError
from rlpipe.shared.regular_file import append_regular

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where no room is left."""

_OF_RUST = re.compile(r"\(os error (\d+)\)")
"""Libraries written in Rust raise exceptions of their own, of which only the text tells what the system refused."""


@contextmanager
def written_whole(partial: Path) -> Iterator[None]:
    """The block writes the folder `partial`, and gives it its final name at the end.

    Raises:
        DiskFullError: nothing of the folder is left.
    """
    try:
        yield
    except Exception as error:
        number = _number(error)
        if number not in FULL:
            raise
        shutil.rmtree(partial, ignore_errors=True)
        raise DiskFullError(
            f"{partial.parent}: cannot be written to ({os.strerror(number)}): free space there"
        ) from None


@contextmanager
def left_out_when_full() -> Iterator[None]:
    """The block writes a note that no engine and no rank is to end for. Whoever reads the run learns of the disk from
    the driver, whose next row has no room either."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise


def append_if_room(path: Path, text: str) -> None:
    """Append a note whole, or not at all where the disk is full."""
    with left_out_when_full(), append_regular(path) as file:
        append_whole(file, text.encode())


def append_whole(file: BinaryIO, content: bytes) -> None:
    """Write `content` to the end of an unbuffered file. Raises OSError, and then the file is what it was."""
    size = file.seek(0, os.SEEK_END)
    left = memoryview(content)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(size)
        raise


def _number(error: Exception) -> int:
    """Of the system's error that is behind it; 0 where none is."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = _OF_RUST.search(str(error))
    return int(found[1]) if found else 0
