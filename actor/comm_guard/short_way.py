"""What a collective pays for a guard that has nothing to do: one look-up and one count.

A method with a signature of its own costs less than half of one that packs its arguments, which is felt by small
collectives; so there is one for each number of arguments that torch.distributed passes often.
"""

from collections.abc import Callable
from typing import Any

from actor.collectives.interception import Method

_ABSENT = object()

Explain = Callable[[RuntimeError, Any, tuple[Any, ...]], None]


def with_short_way(arguments: int, original: Method, settled: dict[Any, int], full: Method, explain: Explain) -> Method:
    """A method that calls `original` and counts for groups in `settled`, and calls `full` for others.

    arguments: how many torch.distributed passes; calls with others go by `full` as well. explain: told of an error of
    `original` before it is raised.
    """
    make = {2: _with_two, 3: _with_three, 5: _with_five}.get(arguments)
    return full if make is None else make(original, settled, full, explain)


def _with_two(original: Method, settled: dict[Any, int], full: Method, explain: Explain) -> Method:
    def method(group: Any, a: Any = _ABSENT, b: Any = _ABSENT, *more: Any, **named: Any) -> Any:
        if group in settled and b is not _ABSENT and not more and not named:
            settled[group] += 1
            try:
                return original(group, a, b)
            except RuntimeError as error:
                explain(error, group, (a, b))
                raise
        return full(group, *(x for x in (a, b) if x is not _ABSENT), *more, **named)

    return method


def _with_three(original: Method, settled: dict[Any, int], full: Method, explain: Explain) -> Method:
    def method(group: Any, a: Any = _ABSENT, b: Any = _ABSENT, c: Any = _ABSENT, *more: Any, **named: Any) -> Any:
        if group in settled and c is not _ABSENT and not more and not named:
            settled[group] += 1
            try:
                return original(group, a, b, c)
            except RuntimeError as error:
                explain(error, group, (a, b, c))
                raise
        return full(group, *(x for x in (a, b, c) if x is not _ABSENT), *more, **named)

    return method


def _with_five(original: Method, settled: dict[Any, int], full: Method, explain: Explain) -> Method:
    def method(
        group: Any,
        a: Any = _ABSENT,
        b: Any = _ABSENT,
        c: Any = _ABSENT,
        d: Any = _ABSENT,
        e: Any = _ABSENT,
        *more: Any,
        **named: Any,
    ) -> Any:
        if group in settled and e is not _ABSENT and not more and not named:
            settled[group] += 1
            try:
                return original(group, a, b, c, d, e)
            except RuntimeError as error:
                explain(error, group, (a, b, c, d, e))
                raise
        return full(group, *(x for x in (a, b, c, d, e) if x is not _ABSENT), *more, **named)

    return method
