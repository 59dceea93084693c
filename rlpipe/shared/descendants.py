"""Processes below this one, also those whose own parent has ended: none of them is to outlive a run."""

import ctypes
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress

import psutil

_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_TERM_SECONDS = 3.0
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.2


def adopt_orphans() -> None:
    """From now on a process below this one becomes its child when its own parent ends, instead of leaving the tree."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(known: Collection[int] = ()) -> list[psutil.Process]:
    """All processes below this one, without those whose ids are `known`."""
    return [process for process in psutil.Process().children(recursive=True) if process.pid not in known]


def end_descendants(known: Collection[int] = (), term_seconds: float = _TERM_SECONDS) -> None:
    """End all processes below this one that are not `known`, and those that they start meanwhile.

    term_seconds: how long they may take to end by themselves.
    """
    if term_seconds:
        processes = _signalled(signal.SIGTERM, known)
        psutil.wait_procs(processes, timeout=term_seconds)
    end = time.monotonic() + _KILL_SECONDS
    while (processes := _signalled(signal.SIGKILL, known)) and time.monotonic() < end:
        psutil.wait_procs(processes, timeout=_POLL_SECONDS)


def end_of(pid: int) -> str | None:
    """How the child `pid` of this process ended, in words; None while it runs. Whoever waits for it still can."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return "it has ended"
    if ended is None:
        return None
    if ended.si_code == os.CLD_EXITED:
        return f"it ended with exit code {ended.si_status}"
    return f"it was ended by {signal.Signals(ended.si_status).name}"


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process, as SIGSTOP does."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def _signalled(number: signal.Signals, known: Collection[int]) -> list[psutil.Process]:
    processes = descendants(known)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return processes
