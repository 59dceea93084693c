"""Processes of a machine that need the same kernels at the same time: one compiles them, the others load them."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def after_the_first(name: str) -> Iterator[bool]:
    """Of processes that come with the same `name` one enters at once, and gets True. The others enter together when it
    has left, or has ended, and find what it compiled in the caches that they share.

    Eight ranks that all compile for themselves take each other's cores, and those of the engines. Where no file can be
    locked nobody waits.
    """
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path("~/.triton/cache").expanduser()) / "turns"
    descriptor = -1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / hashlib.sha256(name.encode()).hexdigest()[:32]
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        is_first = _locked(descriptor)
    except OSError:
        is_first = True
    try:
        yield is_first
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Whether nobody had locked it; returns when whoever came first has let go."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return False
    return True
