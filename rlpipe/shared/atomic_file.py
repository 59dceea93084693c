"""Writing a file so that a crash or a full disk leaves either the old one or the new one, whole."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`. Raises OSError with a file's name, and then `path` is what it was."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new content of `path`, to be written in the block, which may read the old. Raises like `write_atomically`."""
    target = path.resolve()  # a link stays one
    if not target.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "there is no such folder", str(target.parent))
    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # what writing raises does not know it
            error.filename = str(path)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make renames within `folder` survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
