"""Writing a file so that a crash or a full disk leaves either the old one or the new one, whole."""

import errno
import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`. Raises OSError, and then `path` is what it was."""
    target = path.resolve()  # a link stays one
    if not target.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "there is no such folder", str(target.parent))
    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make renames within `folder` survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
