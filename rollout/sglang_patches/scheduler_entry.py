"""What SGLang hands to the processes of its schedulers. Light: it is the first of our modules that they import."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class SchedulerEntry:
    """Runs a scheduler, in a process that got it by pickle. There the collector is paused until all is imported: it
    would walk through all that SGLang makes then, again and again, and find nothing."""

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        from rollout.sglang_patches.scheduler_process import run_scheduler

        run_scheduler(*arguments, **keywords)

    def __reduce__(self) -> tuple[Callable[[], "SchedulerEntry"], tuple[()]]:
        gc.enable()  # SGLang's data-parallel controller hands it on, and has imported all by then
        return _arrived, ()


def _arrived() -> SchedulerEntry:
    """What follows in the pickle, SGLang's arguments, is imported from here on."""
    gc.disable()
    return SchedulerEntry()


@contextmanager
def main_left_out() -> Iterator[None]:
    """Processes that are spawned inside do not import this process's program first: Ray's worker, and Ray with it,
    which a scheduler does without."""
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: main.__dict__[name] for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__dict__.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        main.__dict__.update(hidden)
