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
_POLL_SECONDS = 0.05


def adopt_orphans() -> None:
    """From now on a process below this one becomes its child when its own parent ends, instead of leaving the tree."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(known: Collection[int] = ()) -> list[psutil.Process]:
    """All running processes below this one, without those whose ids are `known`."""
    return [one for one in psutil.Process().children(recursive=True) if one.pid not in known and _runs(one)]


def end_descendants(known: Collection[int] = (), term_seconds: float = _TERM_SECONDS) -> None:
    """End all processes below this one that are not `known`, and those that they start meanwhile. Whoever started one
    of them can still wait for it.

    term_seconds: how long they may take to end by themselves.
    """
    if term_seconds:
        _signal_until_gone(signal.SIGTERM, known, term_seconds, again=False)
    _signal_until_gone(signal.SIGKILL, known, _KILL_SECONDS, again=True)


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
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _signal_until_gone(number: signal.Signals, known: Collection[int], seconds: float, again: bool) -> None:
    end, told = time.monotonic() + seconds, set[int]()
    while (processes := descendants(known)) and time.monotonic() < end:
        for process in processes:
            if again or process.pid not in told:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
                told.add(process.pid)
        time.sleep(_POLL_SECONDS)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
