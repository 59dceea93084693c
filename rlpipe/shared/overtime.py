"""What is to happen where something takes too long, whatever it waits in."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def if_longer_than(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` once, in a thread of its own, where the block lasts longer than `seconds`."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
