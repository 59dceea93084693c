"""Functions that a configuration names: registered ones by their name, others as `package.module:function`."""

import importlib
import inspect
import json
from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from rlpipe.shared.errors import ConfigError
from rlpipe.shared.import_trial import first_line, try_import


def named_function(name: str, registered: Mapping[str, Any], place: str) -> Any:
    """The function behind `name`; a registered one may itself be given as a path, and is imported when first used.

    For processes of the driver: the module of someone else is tried in another process first. Raises ConfigError,
    beginning with `place`, for a name that is not known, a path that cannot be imported, and what is not callable.
    """
    return _named(name, registered, place, tried=name in registered)


def tried_function(name: str, registered: Mapping[str, Any], place: str) -> Any:
    """`named_function` of a name that the driver has looked up before: in a worker, where a trial would only cost."""
    return _named(name, registered, place, tried=True)


def _named(name: str, registered: Mapping[str, Any], place: str, tried: bool) -> Any:
    found = registered.get(name, name)
    if isinstance(found, str):
        found = _imported(name, found, registered, place, tried)
    if not callable(found):
        raise ConfigError(f"{place} {name!r} is a {type(found).__name__}, not a function")
    return found


def _imported(name: str, path: str, registered: Mapping[str, Any], place: str, tried: bool) -> Any:
    module_name, colon, function_name = path.partition(":")
    if not colon:
        known = ", ".join(sorted(registered))
        raise ConfigError(f"{place} {name!r} is unknown: use one of {known}, or package.module:function")
    if not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise ConfigError(f"{place} {path[:200]!r} is not of the form package.module:function")
    if not tried:
        try_import(module_name, f"{place} {path!r}: importing {module_name!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{place} {path!r}: cannot import {module_name!r} ({error}); fix the path") from error
    except (Exception, SystemExit) as error:  # the module is someone else's program, and may raise anything
        where = f" at line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(
            f"{place} {path!r}: importing {module_name!r} failed with {type(error).__name__}{where}: "
            f"{first_line(error)}; see it with --debug"
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


def type_problem(function: Any, options: Mapping[str, object]) -> str | None:
    """Which of `options` has a value that the annotations of `function`, or of a class, do not allow, and why, or None.

    For code of our own, whose annotations hold.
    """
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    for name in options.keys() & hints.keys():
        try:
            # As JSON, since that is what a configuration holds: a list is as good as a tuple, and true is no number.
            TypeAdapter(hints[name]).validate_json(json.dumps(options[name], default=str), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            return f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}, got {options[name]!r:.80}"
    return None
