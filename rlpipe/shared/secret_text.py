"""Keeps secrets out of what is shown, logged or saved: by names of keys, by their place in URLs, by their values."""

import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

HIDDEN = "<hidden>"

_NAMES = (
    r"api_?keys?|access_?key(?:_?id)?|token|secrets?|passw(?:or)?d|passphrase|credentials?|authorization|private_?key"
)
_SECRET_KEY = re.compile(rf"(?:^|[^a-z])(?:\w*_)?(?:{_NAMES}|secret\w*)$", re.IGNORECASE)
# Tokens of a language model, not ones that open something.
_NO_SECRET_KEY = re.compile(r"(?:^|_)(?:per|pad|eos|bos|unk|sep|cls|mask|stop)_token$", re.IGNORECASE)
# Text is as long as whoever wrote it liked, so a search begins where a run of letters does, and not at each letter.
_URL_USER = re.compile(r"((?<!\w)\w+://)([^/@\s'\"]+)@")
_URL_PARAMETER = re.compile(rf"([?&][\w.-]*(?:{_NAMES})=)([^&\s#'\"]+)", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"((?<![\w.-])[\w.-]*(?:{_NAMES})['\"]?\s*[:=]\s*)"
    r"('[^']*'|\"[^\"]*\"|(?:Bearer\s+)?[^\s,;&'\"()\[\]{}]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(\b(?:Bearer|Basic)\s+)[\w.~+/=-]{8,}")
_SHORTEST_VALUE = 8


def is_secret_key(key: str) -> bool:
    """Whether the name of a setting or of an environment variable says that its value is a secret."""
    return bool(_SECRET_KEY.search(key)) and not _NO_SECRET_KEY.search(key)


def hide_in_tree(value: Any, key: str = "") -> Any:
    """A copy of a tree of plain values without secrets: those under secret keys, and those in URLs."""
    if isinstance(value, Mapping):
        return {name: hide_in_tree(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide_in_tree(item, key) for item in value]
    if isinstance(value, str):
        return HIDDEN if is_secret_key(key) else hide_in_urls(value)
    return HIDDEN if is_secret_key(key) and isinstance(value, int | float) and not isinstance(value, bool) else value


def hide_in_urls(text: str) -> str:
    """Without users, passwords and secret parameters of URLs."""
    return _URL_PARAMETER.sub(rf"\1{HIDDEN}", _URL_USER.sub(rf"\1{HIDDEN}@", text))


def secret_values(value: Any, key: str = "") -> Iterator[str]:
    """What `hide_in_tree` hides."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from secret_values(item, str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from secret_values(item, key)
    elif isinstance(value, str):
        if is_secret_key(key):
            yield value
        for found in _URL_USER.finditer(value):
            yield from found[2].split(":")
        for found in _URL_PARAMETER.finditer(value):
            yield found[2]


class Secrets:
    """The values to look for in text: of secret variables of the environment, and of secret settings of `trees`."""

    def __init__(self, *trees: Any) -> None:
        found = {value for name, value in os.environ.items() if is_secret_key(name)}
        found.update(value for tree in trees for value in secret_values(tree))
        # Long ones first: one may be part of another.
        self._values = sorted((value for value in found if len(value) >= _SHORTEST_VALUE), key=len, reverse=True)

    def hide(self, text: str) -> str:
        """Text for people: known values, URLs, and whatever is assigned to a secret name."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        text = _ASSIGNED.sub(_hide_assigned, hide_in_urls(text))
        return _BEARER.sub(rf"\1{HIDDEN}", text)


def hide_in_tracebacks() -> None:
    """From now on, a traceback that ends this process shows no secret of its environment."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.stderr.write(Secrets().hide("".join(traceback.format_exception(kind, error, trace))))

    sys.excepthook = show


def _hide_assigned(found: re.Match[str]) -> str:
    name = re.split(r"['\"]?\s*[:=]", found[1])[0].rpartition(".")[2]
    return found[1] + HIDDEN if is_secret_key(name) and HIDDEN not in found[2] else found[0]
