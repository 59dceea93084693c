"""A full disk while a folder of many files is written, in one sentence."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlpipe.shared.errors import ResourceError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_RUST = re.compile(r"\(os error (\d+)\)")
"""Libraries written in Rust raise exceptions of their own, of which only the text tells what the system refused."""


@contextmanager
def written_whole(partial: Path) -> Iterator[None]:
    """The block writes the folder `partial`, and gives it its final name at the end.

    Raises:
        ResourceError: the disk is full; nothing of the folder is left.
    """
    try:
        yield
    except Exception as error:
        number = _number(error)
        if number not in _FULL:
            raise
        shutil.rmtree(partial, ignore_errors=True)
        raise ResourceError(
            f"{partial.parent}: cannot be written to ({os.strerror(number)}): free space there"
        ) from None


def _number(error: Exception) -> int:
    """Of the system's error that is behind it; 0 where none is."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = _OF_RUST.search(str(error))
    return int(found[1]) if found else 0
