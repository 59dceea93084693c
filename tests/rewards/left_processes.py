"""What a test left running, told from what other programs of the machine run."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@contextmanager
def adopted_orphans() -> Iterator[None]:
    """Inside, what was started here and loses its parent becomes a child of this process, and not of init."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    before = set(psutil.Process().children())
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        for child in set(psutil.Process().children()) - before:
            with suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)


def running_descendants(*arguments: str) -> set[int]:
    """Those of this process with all of `arguments` in their command lines."""
    return {process.pid for process in psutil.Process().children(recursive=True) if _has(process, arguments)}


def _has(process: psutil.Process, arguments: tuple[str, ...]) -> bool:
    try:
        command = process.cmdline()  # of what has ended and was not waited for it is empty
    except psutil.Error:
        return False
    return all(argument in command for argument in arguments)
