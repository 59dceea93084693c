"""Wrapping a method of a class that offers no hook of its own."""

import functools
from collections.abc import Callable
from typing import Any

Around = Callable[..., Any]


def wrap_method(owner: type, name: str, around: Around) -> Callable[[], None]:
    """Make `owner.name(self, ...)` call `around(original, self, ...)`; returns how to undo it.

    AttributeError if the class has no such method of its own.
    """
    if name not in vars(owner):
        raise AttributeError(f"{owner.__qualname__} has no method {name} of its own")
    original = vars(owner)[name]

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)

    def undo() -> None:
        if vars(owner)[name] is wrapper:
            setattr(owner, name, original)

    return undo
