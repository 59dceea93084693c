"""Python's cyclic garbage collector, where GPUs or users would wait for it."""

import atexit
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


@contextmanager
def imports_kept() -> Iterator[None]:
    """For imports of large libraries: the collector stands aside meanwhile, and afterwards looks no more at what they
    made. That stays as long as the process, and one look at it takes up to a second."""
    with collection_paused():
        yield
    gc.freeze()


def keep_what_lives() -> None:
    """What is there now will stay: the collector looks at it no more. Torch, Ray and compilers leave so much that one
    look at all of it takes a tenth of a second and more, in the midst of a pass in which other ranks wait."""
    gc.collect()
    gc.freeze()


def collect_everything() -> None:
    """A look at what the functions above have put aside too, where that holds what has to go."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()


def skip_collection_at_exit() -> None:
    """A process that ends need not look for garbage among what torch and Ray leave behind; its user would wait."""
    atexit.register(gc.freeze)
