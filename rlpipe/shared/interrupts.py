"""Ctrl-C and SIGTERM. A signal is state of the whole process, so this module holds it.

Raising KeyboardInterrupt is not enough: raised inside a library's callback or a finalizer it is swallowed, and the run
would go on. So the request is also remembered, and looked at where a task or a phase begins and while waiting.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

INTERRUPTED = "interrupted; everything that was started is stopped"
INTERRUPTED_EXIT_CODE = 130

_requested_seconds: float | None = None
"""When the first signal came, on the monotonic clock."""
_shields = 0
_grace_seconds: float | None = None


def install() -> None:
    """Handle SIGINT and SIGTERM alike, in the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def requested() -> bool:
    """Whether a signal came."""
    return _requested_seconds is not None


def raise_if_requested() -> None:
    """Raise KeyboardInterrupt when a signal came, even if its own exception was swallowed. In the main thread only,
    and not where the work under way is to end first."""
    held = _shields or _grace_seconds is not None
    if requested() and not held and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


@contextmanager
def finishing(grace_seconds: float) -> Iterator[None]:
    """A signal, earlier or within the block, lets the block go on to its end, for at most `grace_seconds` after it."""
    global _grace_seconds
    before, _grace_seconds = _grace_seconds, grace_seconds
    try:
        if requested():
            _start_grace()
        yield
    finally:
        _grace_seconds = before
        if requested():
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def shielded() -> Iterator[None]:
    """Signals within the block are only remembered: what cleans up is not cut short."""
    global _shields
    _shields += 1
    try:
        yield
    finally:
        _shields -= 1


class CleanupStack(ExitStack):
    """An ExitStack whose unwinding no signal cuts short."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        with shielded():
            return super().__exit__(kind, error, traceback)


def _interrupt(*_: object) -> None:
    global _requested_seconds
    if _requested_seconds is None:
        _requested_seconds = time.monotonic()
    if _shields:
        return
    if _grace_seconds is not None:
        _start_grace()
        return
    raise KeyboardInterrupt


def _start_grace() -> None:
    if _grace_seconds is not None and _requested_seconds is not None:
        left = _requested_seconds + _grace_seconds - time.monotonic()
        signal.signal(signal.SIGALRM, _grace_is_over)
        signal.setitimer(signal.ITIMER_REAL, max(0.001, left))


def _grace_is_over(*_: object) -> None:
    if not _shields:
        raise KeyboardInterrupt
