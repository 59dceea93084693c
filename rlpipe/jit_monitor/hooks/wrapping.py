"""What a hook is, and wrapping a method of a class, or a function of a module, that offers no hook of its own."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rlpipe.jit_monitor.recorder import Recorder

Detach = Callable[[], None]
Attach = Callable[[ModuleType, Recorder], Detach]
Hooks = tuple[tuple[str, Attach], ...]
Around = Callable[..., Any]


def wrap_method(owner: type | ModuleType, name: str, around: Around) -> Detach:
    """Make `owner.name(...)` call `around(original, ...)`, with `self` first for a method; returns how to undo it.

    AttributeError if the class or module has no such name of its own.
    """
    if name not in vars(owner):
        raise AttributeError(f"{owner.__name__} has no {name} of its own")
    original = vars(owner)[name]

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)

    def undo() -> None:
        if vars(owner)[name] is wrapper:
            setattr(owner, name, original)

    return undo
