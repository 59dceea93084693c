"""What we replace or use inside other packages: `python scripts/replaced_parts.py [--in FOLDER] [--accept TARGET ...]`.

Prints which originals differ from those that were read when our code was written, which places reach into another
package without a declaration (`rlpipe/shared/replaced_parts.py`), and "declared / found". The exit code is 1 when there
is one of either kind. Nothing is imported: sources are parsed. --accept notes the installed originals as read, of the
named targets or of `all`, in replaced_parts.json beside this file. --in looks at packages that were only unpacked into
folders (`pip install --no-deps --target FOLDER NAME==VERSION`): at an upgrade before it is installed, or at what a CPU
cannot run.
"""

import ast
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")
ROOMS = ("actor", "rollout", "rlpipe", "rewards")
DISTRIBUTIONS = {
    "torch": "torch",
    "ray": "ray",
    "sglang": "sglang",
    "megatron": "megatron-core",
    "triton": "triton",
    "tilelang": "tilelang",
    "flashinfer": "flashinfer-python",
    "cutlass": "nvidia-cutlass-dsl-libs-base",
    "tvm_ffi": "apache-tvm-ffi",
    "tqdm": "tqdm",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "langdetect": "langdetect",
    "wandb_workspaces": "wandb-workspaces",
}
"""By the name under which a package is imported; its private parts and assignments to its attributes are looked for."""
EXTRAS = ("wandb_workspaces", "verifiers")
"""Packages that a run does without: one feature needs each."""


_search: list[str] | None = None  # folders to look for packages in; None for the environment's own


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class NoSourceError(Exception):
    """A part whose source is not here: its package is not installed, or has no such part."""

    def __init__(self, reason: str, installed: bool) -> None:
        super().__init__(reason)
        self.installed = installed


@dataclass(frozen=True)
class Part:
    """One target of a declaration. place: file and line of ours. replaced: else it is merely used."""

    target: str
    place: str
    replaced: bool
    why: str
    drop_when: str
    texts: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        return self.target.partition(":")[0].partition(".")[0]

    @property
    def file(self) -> str:
        return self.place.partition(":")[0]

    @property
    def last_name(self) -> str:
        """Empty for a whole module."""
        return self.target.partition(":")[2].rpartition(".")[2]


@dataclass(frozen=True)
class TouchPoint:
    """A place that reaches into another package. name: of the part; empty where it is known at run time only."""

    file: str
    line: int
    name: str
    text: str


# --- declarations


def declared_parts(root: Path = ROOT) -> list[Part]:
    """All targets of all declarations, in the order of the files."""
    found: list[Part] = []
    for path in our_files(root):
        text = path.read_text()
        if "replaces(" in text or "relies_on(" in text:
            found += _parts_of(path.relative_to(root), ast.parse(text))
    return found


def our_files(root: Path) -> list[Path]:
    """Python files of the rooms; what stands in for a package that a CPU lacks replaces nothing that is there."""
    files = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    means = ("replaced_parts.py", "wrapping.py")  # by which callers declare and wrap
    return [path for path in files if "cpu_stand_ins" not in path.parts and path.name not in means]


def _parts_of(path: Path, tree: ast.Module) -> Iterator[Part]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id not in ("replaces", "relies_on"):
            continue
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        for target in node.args:
            yield Part(ast.literal_eval(target), f"{path}:{node.lineno}", node.func.id == "replaces", **options)


# --- originals


def source_of(target: str) -> str:
    """The text of the original. Raises NoSourceError."""
    module, _, name = target.partition(":")
    path = _file_of(module)
    text = path.read_text(errors="replace")
    return _segment(module, path, text, name) if name else text


def fingerprint(target: str) -> str:
    """Twelve hexadecimal digits that stand for the original's text; for a program's, whose words alone matter, nothing
    but its presence. Raises NoSourceError."""
    if ":" not in target and not _file_of(target).suffix:
        return "program"
    return hashlib.sha256(source_of(target).encode()).hexdigest()[:12]


def _file_of(module: str) -> Path:
    top, *inside = module.split(".")
    spec = PathFinder.find_spec(top, _search)
    if spec is None or not spec.submodule_search_locations or _installed_version(top) is None:
        raise NoSourceError(f"{DISTRIBUTIONS.get(top, top)} is not installed", installed=False)
    for location in spec.submodule_search_locations:
        path = Path(location).joinpath(*inside)
        stubs = (path.with_suffix(".pyi"), path / "__init__.pyi")
        for candidate in (path.with_suffix(".py"), path / "__init__.py", *stubs, path):
            if candidate.is_file():
                return candidate
    raise NoSourceError(f"the installed {top} has no {module}", installed=True)


@cache
def _installed_version(package: str) -> str | None:
    name = DISTRIBUTIONS.get(package, package)
    found = distributions(name=name) if _search is None else distributions(name=name, path=_search)
    return next((one.version for one in found), None)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(errors="replace"))


def _segment(module: str, path: Path, text: str, name: str) -> str:
    node: ast.AST = _tree(path)
    for attribute in name.split("."):
        found = _member(node, attribute)
        if found is None and path.suffix == ".pyi":
            return "compiled, and not in its stub"
        if found is None:
            raise NoSourceError(f"the installed {module} has no {name}", installed=True)
        if isinstance(found, ast.ImportFrom):
            origin = next(alias.name for alias in found.names if (alias.asname or alias.name) == attribute)
            rest = name[name.index(attribute) + len(attribute) :]
            package = _absolute(module, path, found)
            if package == module and origin == attribute:  # a package imports a module of its own
                return source_of(f"{package}.{origin}:{rest.removeprefix('.')}".rstrip(":"))
            return source_of(f"{package}:{origin}{rest}")
        node = found
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(one.lineno for one in decorators)])  # type: ignore[attr-defined]
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])  # type: ignore[attr-defined]


def _member(scope: ast.AST, name: str) -> ast.AST | None:
    """The statement that defines `name`, perhaps in an `if`: of several a definition, else the last one."""
    found = None
    statements = list(getattr(scope, "body", []))
    while statements:
        statement = statements.pop(0)
        if name in _names_of(statement):
            found = found if isinstance(found, _DEFINITIONS) else statement
        elif isinstance(statement, (ast.If, ast.Try, ast.With)):
            handlers = [line for handler in getattr(statement, "handlers", []) for line in handler.body]
            statements[:0] = [*statement.body, *getattr(statement, "orelse", []), *handlers]
    if found is None and isinstance(scope, (ast.FunctionDef, ast.ClassDef)):
        # An attribute that a method sets.
        attributes = (one for one in ast.walk(scope) if isinstance(one, (ast.Assign, ast.AnnAssign)))
        return next((one for one in attributes if {f"self.{name}", f"cls.{name}"} & _names_of(one)), None)
    return found


def _names_of(statement: ast.AST) -> set[str]:
    if isinstance(statement, _DEFINITIONS):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in statement.names}
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return {ast.unparse(part) for one in targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])}


def _absolute(module: str, path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


# --- touch points


def touch_points(root: Path = ROOT) -> list[TouchPoint]:
    """Places of ours that reach into the packages of DISTRIBUTIONS: imports of private names; private attributes;
    assignments to attributes of what was imported; `setattr` and `wrap_method` on others' objects; overridden private
    methods; and words of others' messages are declared with `texts`, which no pattern finds."""
    found = []
    for path in our_files(root):
        tree = ast.parse(path.read_text())
        scan = _Scan(str(path.relative_to(root)), tree)
        scan.visit(tree)
        found += scan.found
    return sorted(set(found), key=lambda one: (one.file, one.line, one.name))


class _Scan(ast.NodeVisitor):
    """A file's touch points. What is private is one of ours where this file defines the name, or its root is `self`."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        self.found: list[TouchPoint] = []
        self._file = file
        self._foreign = _foreign_names(tree)
        self._own = {name for name in _defined_names(tree) if _is_private(name)}

    def _add(self, node: ast.AST, name: str) -> None:
        line = getattr(node, "lineno", 0)
        self.found.append(TouchPoint(self._file, line, name, ast.unparse(node).splitlines()[0][:100]))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] in DISTRIBUTIONS:
            private = [alias.name for alias in node.names if _is_private(alias.name)]
            inside = [part for part in (node.module or "").split(".") if _is_private(part)]
            for name in private or ([alias.name for alias in node.names] if inside else []):
                self._add(node, name)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] in DISTRIBUTIONS and any(map(_is_private, alias.name.split("."))):
                self._add(node, alias.name.rpartition(".")[2])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        root = _root(node.value)
        on_own = root in ("self", "cls", "os", "sys") and isinstance(node.value, ast.Name)
        if _is_private(node.attr) and not on_own and node.attr not in self._own:
            self._add(node, node.attr)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        targets = [part for one in node.targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
        for target in targets:
            if isinstance(target, ast.Attribute) and _root(target) in self._foreign:
                self._add(node, target.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("setattr", "wrap_method") and len(node.args) > 1:
            name = node.args[1]
            on_own = _root(node.args[0]) == "self"
            if not on_own:
                self._add(node, str(name.value) if isinstance(name, ast.Constant) else "")
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = {_root(base) for base in node.bases}
        if bases & self._foreign.keys():
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            for method in methods:
                if any(self._inherited(base, method.name) for base in node.bases):
                    self._add(method, method.name)
        self.generic_visit(node)

    def _inherited(self, base: ast.expr, method: str) -> bool:
        """Whether a foreign base has a private method of that name, as far as its source is here."""
        first, _, rest = ast.unparse(base).partition(".")
        origin = self._foreign.get(first, "")
        if not _is_private(method) or not origin:
            return False
        # What is imported from a package is a module where the base is reached through it.
        names = f"{origin.replace(':', '.')}:{rest}" if rest else origin
        try:
            source_of(f"{names}.{method}")
        except NoSourceError:
            return False
        return True


def _foreign_names(tree: ast.Module) -> Mapping[str, str]:
    """Names that stand for a part of another package, and the part where an import says it. A local variable that is
    made from one by plain assignment, a call of import_module, or annotated Any and assigned from one counts."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in DISTRIBUTIONS:
            names |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in DISTRIBUTIONS:
                    names[alias.asname or alias.name.split(".")[0]] = alias.name
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and value is not None:
            made = isinstance(value, (ast.Attribute, ast.Name)) and _root(value) in names
            imported = "import_module(" in ast.unparse(value)
            if made or imported:
                names |= {name: "" for name in _names_of(node) if name.isidentifier()}
    # A hook is given the module that it attaches to.
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None and ast.unparse(node.annotation) == "ModuleType":
            names[node.arg] = ""
    return names


def _defined_names(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and attributes of `self` that the file makes, and fields of its classes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            yield from (name.removeprefix("self.") for name in _names_of(node))


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_private(name: str) -> bool:
    documented = ("_", "_fields", "_asdict", "_replace")
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name not in documented


def undeclared(parts: list[Part], points: list[TouchPoint]) -> list[TouchPoint]:
    """Those that no declaration in their file covers: it has a target or a text of that name, or a target without a
    name where that is known at run time only."""
    names: dict[str, set[str]] = {}
    for part in parts:
        names.setdefault(part.file, set()).update((part.last_name, *part.texts))
        names[part.file].update(part.target.partition(":")[0].split("."))
    return [
        one for one in points if one.name not in names.get(one.file, ()) and not (not one.name and one.file in names)
    ]


# --- comparison with what was read


@dataclass(frozen=True)
class Comparison:
    """A sentence for each part that differs, for each whose package is not installed, and for each of an extra that
    is not."""

    changed: list[str]
    skipped: list[str]
    without: list[str]


def read_record() -> dict[str, dict[str, str]]:
    """By target: by fingerprint, the version in which it was read first."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def compare(parts: list[Part], record: Mapping[str, Mapping[str, str]]) -> Comparison:
    changed: list[str] = []
    skipped: list[str] = []
    without: list[str] = []
    by_target: dict[str, list[Part]] = {}
    for part in parts:
        by_target.setdefault(part.target, []).append(part)
    for target, users in sorted(by_target.items()):
        places = ", ".join(part.place for part in users)
        try:
            text, found = source_of(target), fingerprint(target)
        except NoSourceError as error:
            absent = without if users[0].package in EXTRAS else skipped
            (changed if error.installed else absent).append(f"{target} ({places}): {error}")
            continue
        package = users[0].package
        here = f"{DISTRIBUTIONS.get(package, package)} {_installed_version(package)}"
        if found not in record.get(target, {}):
            known = ", ".join(sorted(set(record.get(target, {}).values()))) or "none"
            changed.append(f"{target} of {here} is not what was read ({known}); look at {places}, then accept it")
        for words in sorted({words for part in users for words in part.texts}):
            if words not in text:
                changed.append(f"{target} of {here} has lost the words {words!r}; look at {places}")
    return Comparison(changed, skipped, without)


def accept(parts: list[Part], names: list[str]) -> None:
    record = read_record()
    for part in parts:
        if "all" not in names and part.target not in names:
            continue
        try:
            found = fingerprint(part.target)
        except NoSourceError as error:
            print(f"{part.target}: {error}")
            continue
        record.setdefault(part.target, {}).setdefault(found, str(_installed_version(part.package)))
    targets = {part.target for part in parts}
    kept = {target: record[target] for target in sorted(record) if target in targets}
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    global _search
    if arguments[:1] == ["--in"]:
        _search, arguments = arguments[1].split(os.pathsep), arguments[2:]
    parts, points = declared_parts(), touch_points()
    if arguments[:1] == ["--accept"]:
        accept(parts, arguments[1:])
        return 0
    result, missing = compare(parts, read_record()), undeclared(parts, points)
    for line in result.changed:
        print(f"changed: {line}")
    for one in missing:
        print(f"not declared: {one.file}:{one.line}: {one.text}")
    for line in result.skipped:
        print(f"not here: {line}")
    for line in result.without:
        print(f"without an extra: {line}")
    absent = len(result.skipped) + len(result.without)
    print(f"{len(parts)} parts in {len({part.file for part in parts})} files; {absent} not installed here")
    print(f"touch points: {len(points) - len(missing)} declared / {len(points)} found")
    return 1 if result.changed or missing else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
