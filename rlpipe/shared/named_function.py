"""Functions that a configuration names: registered ones by their name, others as `package.module:function`."""

import importlib
from collections.abc import Mapping
from typing import Any

from rlpipe.shared.errors import ConfigError


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
    try:
        return getattr(importlib.import_module(module_name), function_name)
    except ImportError as error:
        raise ConfigError(f"{place} {path!r}: cannot import {module_name!r} ({error}); fix the path") from error
    except AttributeError:
        raise ConfigError(f"{place} {path!r}: module {module_name!r} has no {function_name!r}") from None
