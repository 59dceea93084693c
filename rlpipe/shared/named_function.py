"""Functions that a configuration names: registered ones by their name, others as `package.module:function`."""

import importlib
import inspect
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlpipe.shared.errors import ConfigError

PATIENCE_SECONDS = 30.0


def named_function(name: str, registered: Mapping[str, Any], place: str) -> Any:
    """The function behind `name`; a registered one may itself be given as a path, and is imported when first used.

    Raises ConfigError, beginning with `place`, for a name that is not known, a path that cannot be imported, and what
    is not callable.
    """
    found = registered.get(name, name)
    if isinstance(found, str):
        found = _imported(name, found, registered, place)
    if not callable(found):
        raise ConfigError(f"{place} {name!r} is a {type(found).__name__}, not a function")
    return found


def _imported(name: str, path: str, registered: Mapping[str, Any], place: str) -> Any:
    module_name, colon, function_name = path.partition(":")
    if not colon:
        known = ", ".join(sorted(registered))
        raise ConfigError(f"{place} {name!r} is unknown: use one of {known}, or package.module:function")
    if not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise ConfigError(f"{place} {path[:200]!r} is not of the form package.module:function")
    try:
        with _told_if_slow(f"{place} {path!r}: importing {module_name!r}"):
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{place} {path!r}: cannot import {module_name!r} ({error}); fix the path") from error
    except (Exception, SystemExit) as error:  # the module is someone else's program, and may raise anything
        where = f" at line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(
            f"{place} {path!r}: importing {module_name!r} failed with {type(error).__name__}{where}: "
            f"{_first_line(error)}; see it with --debug"
        ) from error
    try:
        return getattr(module, function_name)
    except AttributeError:
        raise ConfigError(f"{place} {path!r}: module {module_name!r} has no {function_name!r}") from None


def call_problem(function: Any, /, *arguments: Any, **options: Any) -> str | None:
    """Why `function` cannot be called so, by its signature alone; None where it can, or has no signature to tell."""
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        return str(error)
    except ValueError:
        return "it has no signature, so it cannot be checked; wrap it in a function of your own"
    return None


@contextmanager
def _told_if_slow(what: str) -> Iterator[None]:
    """A module is someone else's program, and may take for ever."""
    words = f"{what} takes longer than {PATIENCE_SECONDS:g} seconds; Ctrl-C ends it"
    timer = threading.Timer(PATIENCE_SECONDS, print, (words,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]
