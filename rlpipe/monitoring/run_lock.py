"""One process at a time works in the folder of a run."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rlpipe.shared.errors import ResourceError


def lock_path(folder: Path) -> Path:
    """Beside the folder, which may be moved or removed while the lock is held."""
    return folder.with_name(f".{folder.name}.lock")


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of the run in `folder`; it is free again when the process ends, however that happens.

    Raises ResourceError, naming the process that holds it.
    """
    path = lock_path(folder)
    descriptor = _acquire(path, folder)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path, folder: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(_owner()).encode(), 0)
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise ResourceError(
                f"{folder}: a run of this name is going on{_held_by(path)}: wait for its end, stop it, or choose "
                "another run.name"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise ResourceError(
                f"{path}: the run's lock cannot be taken ({error.strerror}): free space there, or choose a "
                "run.directory on a file system with locks"
            ) from None
        os.close(descriptor)  # the holder before removed the file after it was opened here


def _owner() -> dict[str, str | int]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat(timespec="seconds")}


def _held_by(path: Path) -> str:
    try:
        owner = json.loads(path.read_bytes())
        return f" (process {owner['pid']} on {owner['host']} since {owner['since']})"
    except (OSError, ValueError, KeyError, TypeError):  # it has just been taken, or is gone
        return ""
