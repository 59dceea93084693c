"""The one point that sees every collective: methods of `ProcessGroup`, whose class is global to the process.

Why here: functions of torch.distributed are bound by name all over Megatron and torch, so replacing them misses calls;
a Python kernel in the dispatcher sees all calls but costs as much as a small collective and runs where Gloo's threads
release tensors without the interpreter lock. A method is looked up when it is called, so no alias can bypass it, and
each collective calls exactly one.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import ProcessGroup

from actor.collectives.operations import END_OF_BATCH, OPERATIONS, methods_of
from rlpipe.shared.replaced_parts import replaces

replaces(
    "torch._C._distributed_c10d:ProcessGroup",
    why="memory is looked at before a collective; torch has no listener for them",
    drop_when="torch tells a listener when a collective starts",
)

Method = Callable[..., Any]
MakeMethod = Callable[[str, Method], Method]


def intercept(make: MakeMethod, make_end_of_batch: Callable[[Method], Method] | None = None) -> Callable[[], None]:
    """Replace each collective method by `make(operation, original)`, and where batches of sends and receives are
    launched if that is wanted. Returns how to put the very same methods back.

    Raises ActorError, before anything is replaced, if torch lacks an operation.
    """
    methods = {
        method: functools.partial(make, operation)
        for operation in OPERATIONS
        for method in methods_of(operation, vars(ProcessGroup))
    }
    replaced: dict[str, Any] = methods if make_end_of_batch is None else {END_OF_BATCH: make_end_of_batch, **methods}
    # The class's own entries: what getattr gives is no method any more when it is set again.
    entries = {name: vars(ProcessGroup)[name] for name in replaced}
    for name, make_method in replaced.items():
        original = getattr(ProcessGroup, name)
        setattr(ProcessGroup, name, functools.wraps(original)(make_method(original)))

    def undo() -> None:
        for name, entry in entries.items():
            setattr(ProcessGroup, name, entry)

    return undo
