"""YAML as configurations are written: the core schema of YAML 1.2, plain data only, nothing read in two ways.

YAML 1.1 reads `010` as 8, `1:30` as 90, `yes` as true and `1e-6` as text. Here words are text, `1e-6` is a number, and
a number with a leading zero is refused. So are duplicate keys, tags, aliases that contain themselves, and files that
are nested or expanded beyond what a configuration can be.
"""

import re
from collections.abc import Hashable, Iterator
from math import isfinite
from typing import Any

import yaml

_MAX_DEPTH = 40
_MAX_VALUES = 200_000
_CHARACTERS_OF_A_VALUE = 100
MAX_CHARACTERS = 8 * 2**20
"""Of a document, at most."""
_MAX_DIGITS = 400

_NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"(?:[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+\Z")
_TAG = "tag:yaml.org,2002:"
_FIRST_OF_NUMBERS = list("-+.0123456789")
_NO_CHARACTER = re.compile("[\x00\ud800-\udfff]")


class StrictYamlError(ValueError):
    """What is wrong, without the file; `line` and `column` count from 1 where they are known."""

    def __init__(self, problem: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(problem)
        self.line, self.column = line, column

    @classmethod
    def at(cls, problem: str, mark: Any) -> "StrictYamlError":
        return cls(problem) if mark is None else cls(problem, mark.line + 1, mark.column + 1)


def load_yaml(text: str) -> Any:
    """The plain data of one YAML document; None for an empty one. Raises StrictYamlError."""
    if len(text) > MAX_CHARACTERS:
        raise StrictYamlError(f"more characters than a configuration has (at most {MAX_CHARACTERS:,})")
    try:
        _check_depth(text)
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(node, {}, ())
        return loader.construct_document(node)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise StrictYamlError(f"not valid YAML: character {error.character!r} is not allowed", line, None) from None
    except yaml.MarkedYAMLError as error:
        problem = error.problem or error.context or "it cannot be parsed"
        raise StrictYamlError.at(f"not valid YAML: {problem}", error.problem_mark or error.context_mark) from None


def dump_yaml(tree: Any) -> str:
    """`tree` as YAML that `load_yaml`, and parsers of YAML 1.1, read back equal."""
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def unusable_values(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """(dotted key, problem) of each value that nothing can work with: inf, NaN, text with NUL or half a character."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from unusable_values(key, path)
            yield from unusable_values(value, (*path, str(key)))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from unusable_values(value, (*path, str(index)))
    elif isinstance(tree, float) and not isfinite(tree):
        yield ".".join(path), f"{tree} is not a finite number"
    elif isinstance(tree, str) and (found := _NO_CHARACTER.search(tree)):
        yield ".".join(path), f"the text holds {ascii(found[0])}, which is not a character"


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars by the core schema, and constructs nothing but plain data."""

    yaml_implicit_resolvers: dict[Any, Any] = {}
    yaml_constructors: dict[Any, Any] = {}


class _Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would take for something else; knows no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _construct_mapping(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    pairs = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise StrictYamlError.at("a list or mapping cannot be a key", key_node.start_mark)
        pairs[key] = loader.construct_object(value_node, deep=True)
    return pairs


def _construct_sequence(loader: Any, node: yaml.SequenceNode) -> list[Any]:
    return [loader.construct_object(item, deep=True) for item in node.value]


def _construct_int(loader: Any, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if _LEADING_ZERO.match(text):
        raise StrictYamlError.at(
            f"the number {text} has a leading zero, which some read as octal; write {text.lstrip('+-0') or '0'}, "
            f"or quote it if it is text",
            node.start_mark,
        )
    if len(text) > _MAX_DIGITS:
        raise StrictYamlError.at(f"a number of {len(text)} digits; quote it if it is text", node.start_mark)
    try:
        return int(text, 0)
    except ValueError:
        raise StrictYamlError.at(f"{text[:80]!r} is not a whole number", node.start_mark) from None


def _construct_float(loader: Any, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node))
    try:
        return float(re.sub(r"\.(inf|nan)", r"\1", text.lower()))
    except ValueError:
        raise StrictYamlError.at(f"{text[:80]!r} is not a number", node.start_mark) from None


def _construct_bool(loader: Any, node: yaml.ScalarNode) -> bool:
    text = str(loader.construct_scalar(node))
    if not _BOOL.match(text):
        raise StrictYamlError.at(f"{text[:80]!r} is neither true nor false", node.start_mark)
    return text.lower() == "true"


def _refuse_tag(loader: Any, node: yaml.Node) -> None:
    raise StrictYamlError.at(f"the tag {node.tag.replace(_TAG, '!!')!r} is not plain data; remove it", node.start_mark)


def _check_depth(text: str) -> None:
    """Looks at events alone, which PyYAML makes without recursion, unlike everything after them."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                raise StrictYamlError.at(f"nested more than {_MAX_DEPTH} levels deep", event.start_mark)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _check_nodes(node: yaml.Node, sizes: dict[int, int], above: tuple[int, ...]) -> int:
    """How much `node` becomes once its aliases are written out. `sizes`: of the nodes that were looked at already."""
    if id(node) in above:
        raise StrictYamlError.at("an anchor contains itself by an alias", node.start_mark)
    if id(node) not in sizes:
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        own = 1 + (len(node.value) // _CHARACTERS_OF_A_VALUE if isinstance(node, yaml.ScalarNode) else 0)
        sizes[id(node)] = own + sum(_check_nodes(child, sizes, (*above, id(node))) for child in children)
    if sizes[id(node)] > _MAX_VALUES:
        raise StrictYamlError.at(f"it expands to more than {_MAX_VALUES:,} values", node.start_mark)
    return sizes[id(node)]


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[tuple[str, str]] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in seen:
                raise StrictYamlError.at(f"the key {key.value[:80]!r} stands twice here; remove one", key.start_mark)
            seen.add((key.tag, key.value))


for _tag, _pattern, _first in (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, _FIRST_OF_NUMBERS),
    ("float", _FLOAT, _FIRST_OF_NUMBERS),
    ("merge", re.compile(r"<<\Z"), ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_TAG + _tag, _pattern, _first)
for _tag, _construct in (
    ("null", lambda loader, node: None),
    ("bool", _construct_bool),
    ("int", _construct_int),
    ("float", _construct_float),
    ("str", lambda loader, node: loader.construct_scalar(node)),
    ("merge", lambda loader, node: "<<"),
    ("seq", _construct_sequence),
    ("map", _construct_mapping),
):
    _Loader.add_constructor(_TAG + _tag, _construct)
_Loader.add_constructor(None, _refuse_tag)
