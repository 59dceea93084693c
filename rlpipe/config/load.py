"""From a YAML file and overrides to a `Config`.

    base: [recipes/common.yaml]       # files merged first, relative to this one; later ones win
    model: {path: runs/policy-${seed}}  # ${dotted.key} is replaced by that key's value

All other paths are relative to the folder that the command runs in, whatever file they stand in.

Mappings merge key by key; anything else, lists included, replaces what was there. In an override a number stands for
an element of a list: `data.train.0.path=my.jsonl`.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlpipe.config.root import Config
from rlpipe.config.strict_yaml import MAX_CHARACTERS, StrictYamlError, load_yaml, unusable_values
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.project_files import ROOT
from rlpipe.shared.regular_file import open_regular
from rlpipe.shared.secret_text import secret_values

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_MAX_REFERENCE_DEPTH = 10
_MAX_RESOLVED_CHARACTERS = 2**20
_MAX_FILES = 100
_SHOWN_PROBLEMS = 5
_SHOWN_CHARACTERS = 100
Root = TypeVar("Root", bound=BaseModel)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, merge its bases and the `key.sub=value` overrides, resolve references and validate.

    Raises ConfigError with one sentence that names the file, the key and the fix.
    """
    tree = _Files().read(Path(path))
    for override in overrides:
        tree = _overridden(tree, override)
    return validate(_References(tree, Config).resolve(tree), str(path))


def load_section(root: type[Root], path: Path) -> Root:
    """Read a file that holds another kind of configuration than a run's, with bases and references too."""
    tree = _Files().read(path)
    return _validated(root, _References(tree, root).resolve(tree), str(path))


def configuration_files(path: Path) -> list[Path]:
    """`path` and all files that it is based on, each once. Raises ConfigError."""
    files = _Files()
    files.read(path)
    return list(dict.fromkeys(file.resolve() for file in files.found))


def validate(tree: Mapping[str, Any], source: str) -> Config:
    """Make a Config of a plain mapping. Raises ConfigError naming each wrong key; `source` stands before it."""
    return _validated(Config, tree, source)


def _validated(root: type[Root], tree: Mapping[str, Any], source: str) -> Root:
    for key, problem in unusable_values(tree):
        raise ConfigError(f"{source}: {key}: {problem}; correct it")
    try:
        return root.model_validate(dict(tree))
    except ValidationError as error:
        sentences = [_sentence(detail, root) for detail in error.errors()]
        more = f"; and {len(sentences) - _SHOWN_PROBLEMS} more" if len(sentences) > _SHOWN_PROBLEMS else ""
        raise ConfigError(f"{source}: " + "; ".join(sentences[:_SHOWN_PROBLEMS]) + more) from None


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`: mappings merge, everything else replaces."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


class _Files:
    """Reads a file with its bases. `found`: all of them; bases of bases can be more than anyone would wait for."""

    def __init__(self) -> None:
        self.found: list[Path] = []

    def read(self, path: Path, parents: tuple[Path, ...] = ()) -> dict[str, Any]:
        tree = _read_yaml(path)
        own = path.resolve()
        if own in parents:
            raise ConfigError(f"{path}: `base` leads back to the file itself; remove one of the references")
        self.found.append(path)
        if len(self.found) > _MAX_FILES:
            raise ConfigError(f"{path}: `base` leads to more than {_MAX_FILES} files; remove some")
        bases = tree.pop("base", [])
        if isinstance(bases, str):
            bases = [bases]
        if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
            raise ConfigError(f"{path}: `base` is {_short(bases)} but must be a file name or a list of them")
        merged: dict[str, Any] = {}
        for base in bases:
            merged = merge(merged, self.read(path.parent / base, (*parents, own)))
        return merge(merged, tree)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with TextIOWrapper(open_regular(path), encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except FileNotFoundError:
        copy = f", or `rlpipe recipes copy {path}` to have it here" if (ROOT / path).is_file() else ""
        raise ConfigError(f"{path}: no such file; give the path of a YAML configuration{copy}") from None
    except (OSError, ValueError) as error:  # a ValueError is text that is not UTF-8, or a path with NUL
        raise ConfigError(f"{_short(str(path))}: cannot be read as text: {error}") from None
    try:
        tree = load_yaml(text)
    except StrictYamlError as error:
        where = ":".join(str(part) for part in (path, error.line, error.column) if part is not None)
        raise ConfigError(f"{where}: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the file holds {type(tree).__name__}; a mapping of sections is needed")
    if odd := [key for key in tree if not isinstance(key, str)]:
        raise ConfigError(f"{path}: the key {odd[0]!r} is the name of no section; correct it")
    return tree


def _overridden(tree: dict[str, Any], override: str) -> dict[str, Any]:
    """`tree` with one `key.sub=value` laid on it; a number stands for an element of a list."""
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {_short(override)} is not of the form key.sub=value")
    try:
        value = load_yaml(text)
    except StrictYamlError as error:
        raise ConfigError(f"override {_short(override)}: {error}; quote the value if it is text") from None
    if any(secret_values(value, parts[-1])):
        raise ConfigError(
            f"override of {'.'.join(parts)}: it holds a secret, which everybody on this machine could read in the list "
            "of processes; write it into a file of yours that names this one as its `base`"
        )
    below: Any = tree
    for depth, part in enumerate(parts):
        if isinstance(below, list) and not (part.isdecimal() and len(part) < 10 and int(part) < len(below)):
            raise ConfigError(
                f"override {_short(override)}: {'.'.join(parts[:depth])} is a list of {len(below)}, without element "
                f"{_short(part)}; give a number from 0 to {len(below) - 1}, or the whole list"
            )
        below = _child(below, part)
    result: dict[str, Any] = _laid_on(tree, parts, value)
    return result


def _laid_on(below: Any, parts: Sequence[str], value: Any) -> Any:
    if not parts:
        return merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    changed = _laid_on(_child(below, parts[0]), parts[1:], value)
    if isinstance(below, list):
        position = int(parts[0])
        return [*below[:position], changed, *below[position + 1 :]]
    return {**(below if isinstance(below, Mapping) else {}), parts[0]: changed}


def _child(below: Any, part: str) -> Any:
    if isinstance(below, list):
        return below[int(part)]
    return below.get(part) if isinstance(below, Mapping) else None


class _References:
    """Replaces `${dotted.key}` by the value of that key; one that no file sets has its default of `root`."""

    def __init__(self, tree: Mapping[str, Any], root: type[BaseModel]) -> None:
        self._tree = tree
        self._root = root
        self._left = _MAX_RESOLVED_CHARACTERS

    def resolve(self, value: Any, depth: int = 0) -> Any:
        if depth:
            self._left -= 1 + (len(value) if isinstance(value, str) else 0)
        if self._left < 0:
            raise ConfigError(f"references expand to more than {_MAX_RESOLVED_CHARACTERS:,} characters; remove some")
        if isinstance(value, Mapping):
            return {key: self.resolve(item, depth) for key, item in value.items()}
        if isinstance(value, list):
            return [self.resolve(item, depth) for item in value]
        if isinstance(value, str) and _REFERENCE.search(value):
            if depth == _MAX_REFERENCE_DEPTH:
                raise ConfigError(f"{_short(value)}: references go round in a circle")
            whole = _REFERENCE.fullmatch(value)
            if whole:
                return self.resolve(self._look_up(whole[1]), depth + 1)
            return self.resolve(_REFERENCE.sub(self._as_text, value), depth + 1)
        return value

    def _as_text(self, match: re.Match[str]) -> str:
        found = self._look_up(match[1])
        if isinstance(found, str | int | float) and not isinstance(found, bool):
            return str(found)
        raise ConfigError(f"{match[0]} is {_short(found)}, which cannot stand inside a text; give a text or a number")

    def _look_up(self, dotted: str) -> Any:
        value: Any = self._tree
        for part in dotted.split("."):
            if isinstance(value, list) and part.isdecimal() and len(part) < 10 and int(part) < len(value):
                value = value[int(part)]
            elif isinstance(value, Mapping) and part in value:
                value = value[part]
            else:
                return _default(dotted, self._root)
        return value


def _default(dotted: str, root: type[BaseModel]) -> Any:
    section: Any = root
    *parents, last = dotted.split(".")
    for part in parents:
        section = section_of(section, part)
    field = section.model_fields.get(last) if section else None
    if field is None or field.is_required():
        raise ConfigError(f"${{{dotted}}}: no such key, or it has no value; set it or correct the reference")
    value = field.get_default(call_default_factory=True)
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _sentence(detail: Mapping[str, Any], root: type[BaseModel]) -> str:
    location = detail["loc"]
    key = ".".join(str(part) for part in location)
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown key{_suggestion(location, root)}"
    if detail["type"] == "missing":
        return f"{key}: this key is required; add it"
    if detail["type"] == "value_error":
        message = str(detail["ctx"]["error"])
        return message if not key or message.startswith(key) else f"{key}: {message}"
    return f"{key}: {detail['msg'][0].lower()}{detail['msg'][1:]}, but it is {_short(detail['input'])}"


def _short(value: Any) -> str:
    """The value as Python writes it, cut where it is long: it stands in a sentence."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _suggestion(location: Sequence[str | int], root: type[BaseModel]) -> str:
    """The nearest key of the same section; failing that, of any section."""
    section: Any = root
    for part in location[:-1]:
        section = section_of(section, part) if isinstance(part, str) else section
    name = str(location[-1])
    siblings = list(section.model_fields) if section else []
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {'.'.join([*map(str, location[:-1]), near[0]])!r}?"
    everywhere = [dotted for dotted, _ in iter_fields(root)]
    same = [dotted for dotted in everywhere if dotted.rsplit(".", 1)[-1] == name]
    near = sorted(same, key=lambda dotted: dotted.count(".")) or difflib.get_close_matches(
        ".".join(map(str, location)), everywhere, n=1, cutoff=0.0
    )
    return f"; the nearest key is {near[0]!r}" if near else ""


def iter_fields(section: type[BaseModel], prefix: str = "") -> list[tuple[str, Any]]:
    """All fields under `section` with their dotted names, sections themselves left out."""
    fields: list[tuple[str, Any]] = []
    for name, field in section.model_fields.items():
        inner = section_of(section, name)
        if inner is None:
            fields.append((prefix + name, field))
        else:
            fields.extend(iter_fields(inner, f"{prefix}{name}."))
    return fields


def section_of(section: type[BaseModel] | None, name: str) -> type[BaseModel] | None:
    """The section class of a field, also inside `X | None` and `list[X]`."""
    field = section.model_fields.get(name) if section else None
    if field is None:
        return None
    pending = [field.annotation]
    while pending:
        annotation: Any = pending.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
        pending.extend(getattr(annotation, "__args__", ()))
    return None
