"""JSON as data files hold it: UTF-8, no key twice, finite numbers, whole characters. Pure."""

import json
import math
import re
from typing import Any

_MAX_DEPTH = 64
_MAX_DIGITS = 400
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


class StrictJsonError(ValueError):
    """What is wrong with the text, in a few words, without its place."""


def parse_json(text: bytes) -> Any:
    """The value that `text` holds. Raises StrictJsonError."""
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_whole,
        )
    except UnicodeDecodeError as error:
        raise StrictJsonError(f"not valid UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise StrictJsonError(f"not valid JSON: {error.msg} at {line}column {error.colno}") from None
    except RecursionError:
        raise StrictJsonError(f"nested more than {_MAX_DEPTH} levels deep") from None
    _check(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise StrictJsonError(f"the key {ascii(twice[:80])} stands twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise StrictJsonError(f"{name} is not a number in JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise StrictJsonError(f"the number {text[:40]} is too large")
    return value


def _whole(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise StrictJsonError(f"a number of {len(text)} digits")
    return int(text)


def _check(value: Any) -> None:
    """Depth and characters, without recursion: what comes later may recurse."""
    pending = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, str):
            if found := _HALF_CHARACTER.search(item):
                raise StrictJsonError(f"the text holds {ascii(found[0])}, which is half a character")
        elif isinstance(item, dict | list):
            if depth > _MAX_DEPTH:
                raise StrictJsonError(f"nested more than {_MAX_DEPTH} levels deep")
            pending += [(part, depth + 1) for part in (item.values() if isinstance(item, dict) else item)]
            pending += [(key, depth) for key in item] if isinstance(item, dict) else []
