"""Python's cyclic garbage collector, where GPUs or users would wait for it."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """The collector looks at millions of samples each time that their number has grown by a quarter; it does so after
    this. The same holds for what large libraries make as they are imported."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def skip_collection_at_exit() -> None:
    """A process that ends need not look for garbage among what torch and Ray leave behind; its user would wait."""
    atexit.register(gc.freeze)
