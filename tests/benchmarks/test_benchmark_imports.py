"""Benchmarks run seldom: whatever they import from the project has to be there all the same."""

import ast
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
ROOMS = ("rlpipe", "actor", "rollout", "rewards")
SCRIPTS = sorted([*PROJECT.glob("benchmarks/*.py"), *PROJECT.glob("tests/gpu/*.py"), *PROJECT.glob("scripts/*.py")])


def _file(module: str) -> Path | None:
    path = PROJECT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def _defined(file: Path) -> set[str]:
    """Names that a module's own statements bind, those within `if` and `try` too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: f"{script.parent.name}-{script.stem}")
def test_what_a_script_imports_from_the_project_is_there(script):
    missing = []
    for node in ast.walk(ast.parse(script.read_text())):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in ROOMS:
            continue
        file = _file(node.module)
        names = set() if file is None else _defined(file)
        wanted = [alias.name for alias in node.names if _file(f"{node.module}.{alias.name}") is None]
        missing += [f"{node.module}.{name}" for name in wanted if name not in names]
    assert missing == []
