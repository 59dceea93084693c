"""What is to happen where something takes too long, whatever it waits in."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def if_longer_than(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` once, in a thread of its own, where the block lasts longer than `seconds`. Signals are left to other
    threads: one that the main thread puts off for a while must not be handled in this one meanwhile."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    timer.start()  # with the mask of this thread
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def at_most_processor_seconds(seconds: float, error: Exception) -> Iterator[None]:
    """Raises `error` within the block where this process computes for longer, as someone else's program may without
    end. Has no effect but in the main thread, the only one in which Python handles signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
