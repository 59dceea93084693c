"""Where temporary files lie that may be Unix sockets, whose paths have few bytes (unix(7))."""

import os
import sys
import tempfile
from pathlib import Path

LONGEST_BYTES = 36
"""Of a temporary folder: 107 that a socket's path may have, less what Ray adds for its session and `plasma_store`."""
_SHORT = Path("/tmp")
_VARIABLES = ("TMPDIR", "TEMP", "TMP", "RAY_TMPDIR")


def socket_folder() -> Path:
    """The folder for temporary files, or /tmp where its path is too long."""
    folder = Path(tempfile.gettempdir())
    return folder if _is_short(str(folder)) else _SHORT


def shorten_temporary_folder() -> None:
    """Have this process, and all that it starts, take /tmp where the environment names a folder whose path is too long,
    as batch systems make them for a job. Says so."""
    for name in _VARIABLES:
        if not _is_short(given := os.environ.get(name, "")):
            limit = f"too long for the paths of sockets below it (at most {LONGEST_BYTES} bytes)"
            print(f"{name} is {given}, {limit}: {_SHORT} takes its place", file=sys.stderr, flush=True)
            os.environ[name] = str(_SHORT)
            tempfile.tempdir = None  # what was found before


def _is_short(folder: str) -> bool:
    return len(os.fsencode(folder)) <= LONGEST_BYTES
