"""Python's cyclic garbage collector, where GPUs would wait for it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """The collector looks at millions of samples each time that their number has grown by a quarter; it does so after
    this."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
