"""Watches every exchange between processes. The one module that wraps torch's process groups, whose classes are global.

`torch.distributed` and everything above it ends in methods of `ProcessGroup` and in `Work.wait`, whatever name a caller
has imported. On a CPU the wait blocks; on a GPU it makes the compute stream wait, which marks in that stream measure.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch._C._distributed_c10d import ProcessGroup, Work

from actor.rank_clock import RankClock
from rlpipe.shared.replaced_parts import replaces

replaces(
    "torch._C._distributed_c10d:ProcessGroup",
    "torch._C._distributed_c10d:Work",
    "torch._C._distributed_c10d:Work.wait",
    why="every exchange between processes is timed; torch has no listener for them",
    drop_when="torch tells a listener when an exchange starts and when it is waited for",
)

FirstUse = Callable[[str, str], AbstractContextManager[None]]

# Torch renames them (pytorch pull requests 186130 and 186144): those of 2.11 to 2.13, of which it has some.
_METHODS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)  # fmt: skip


def watch_exchanges(clock: RankClock, first_use: FirstUse | None = None) -> Callable[[], None]:
    """From now on exchanges count in `clock`. `first_use(group, operation)` is entered around the first start of each
    kind in a group, which sets up the communicator. Returns how to undo it."""
    # As they lie in the class: taken as attributes they would lose what binds them to an object.
    originals = {name: vars(ProcessGroup)[name] for name in _METHODS if name in vars(ProcessGroup)}
    original_wait = vars(Work)["wait"]
    for name in originals:
        setattr(ProcessGroup, name, watched_start(getattr(ProcessGroup, name), name, clock, first_use))
    Work.wait = watched_wait(Work.wait, clock)  # type: ignore[method-assign]

    def undo() -> None:
        for name, original in originals.items():
            setattr(ProcessGroup, name, original)
        Work.wait = original_wait  # type: ignore[method-assign]

    return undo


def watched_start(
    original: Callable[..., Any], operation: str, clock: RankClock, first_use: FirstUse | None
) -> Callable[..., Any]:
    """The method of a process group that starts an exchange. It runs thousands of times in a step."""
    used: set[str] = set()

    @functools.wraps(original)
    def wrapper(group: Any, *args: Any, **kwargs: Any) -> Any:
        name = group.group_desc or group.group_name
        with clock.exchange:
            if name in used or first_use is None:
                return original(group, *args, **kwargs)
            used.add(name)
            with first_use(name, operation):
                return original(group, *args, **kwargs)

    return wrapper


def watched_wait(original: Callable[..., Any], clock: RankClock) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(work: Any, *args: Any, **kwargs: Any) -> Any:
        with clock.exchange:
            return original(work, *args, **kwargs)

    return wrapper
