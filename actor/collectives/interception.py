"""The one point that sees every exchange between processes, and its listeners. The state is the process's: torch's
classes are global to it.

What is replaced are the methods of `ProcessGroup` and `Work.wait`. Why here: functions of torch.distributed are bound
by name all over Megatron and torch, so replacing them misses calls; a Python kernel in the dispatcher sees all calls
but costs as much as a small collective and runs where Gloo's threads release tensors without the interpreter lock. A
method is looked up when it is called, so no alias can bypass it, and each collective calls exactly one. Only functional
collectives (torch.distributed._functional_collectives) end in C++; nothing here uses them, which a test checks.

Listeners wrap each other in the order in which they came, the last one outermost, and may leave in any order.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

from torch._C._distributed_c10d import ProcessGroup, Work

from actor.collectives.operations import END_OF_BATCH, OPERATIONS, WAIT, methods_of, unknown_methods
from rlpipe.shared.replaced_parts import replaces

replaces(
    "torch._C._distributed_c10d:ProcessGroup",
    "torch._C._distributed_c10d:Work",
    "torch._C._distributed_c10d:Work.wait",
    why="exchanges between processes are timed, and memory is looked at before them; torch has no listener for them",
    drop_when="torch tells listeners when an exchange starts and when it is waited for",
)

Method = Callable[..., Any]
_log = logging.getLogger(__name__)


class Listener(Protocol):
    """What wants to know of exchanges."""

    def around(self, operation: str, call: Method) -> Method:
        """What is called in place of `call`, which starts an operation of `OPERATIONS` or of a name that is not known
        here, ends a batch (`END_OF_BATCH`) or waits (`WAIT`); `call` itself where that is nothing to this listener.

        Its first argument is the group, or the work that is waited for.
        """


_listeners: list[Listener] = []
_originals: dict[tuple[type, str], Any] = {}  # the classes' own entries: what getattr gives is no method when set again
_unknown_calls = 0


def listen(listener: Listener) -> Callable[[], None]:
    """From now on `listener` is called around every exchange of this process. Returns how to end that: without a
    listener the classes have their very own methods again.

    Raises ActorError, before anything is replaced, if torch lacks an operation.
    """
    points = _points()
    _listeners.append(listener)
    _replace(points)

    def leave() -> None:
        if listener in _listeners:
            _listeners.remove(listener)
            _replace(points)

    return leave


def take_unknown_calls() -> int:
    """Calls of operations that the table lacks since the last time. They are timed and guarded under their own name."""
    global _unknown_calls
    calls, _unknown_calls = _unknown_calls, 0
    return calls


def _points() -> dict[tuple[type, str], str]:
    """Methods that are replaced, and the operation of each."""
    present = vars(ProcessGroup)
    found = {(ProcessGroup, method): one for one in OPERATIONS for method in methods_of(one, present)}
    found |= {(ProcessGroup, name): name for name in unknown_methods(present)}
    return found | {(ProcessGroup, END_OF_BATCH): END_OF_BATCH, (Work, WAIT): WAIT}


def _replace(points: dict[tuple[type, str], str]) -> None:
    """Put the present listeners in place of those before."""
    for (owner, name), entry in _originals.items():
        setattr(owner, name, entry)
    _originals.clear()
    for (owner, name), operation in points.items():
        original = getattr(owner, name)
        known = operation in OPERATIONS or operation in (END_OF_BATCH, WAIT)
        method = original if known or not _listeners else _counted(operation, original)
        for listener in _listeners:
            method = listener.around(operation, method)
        if method is not original:
            _originals[owner, name] = vars(owner)[name]
            setattr(owner, name, functools.wraps(original)(method))


def _counted(operation: str, call: Method) -> Method:
    warned = False

    def counted(*arguments: Any, **keywords: Any) -> Any:
        global _unknown_calls
        nonlocal warned
        _unknown_calls += 1
        if not warned:
            warned = True
            _log.warning(
                "torch has an operation ProcessGroup.%s that is not known here: it is timed, and guarded as a policy's "
                "default says; add it to actor/collectives/operations.py",
                operation,
            )
        return call(*arguments, **keywords)

    return counted
