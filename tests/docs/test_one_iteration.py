"""docs/one_iteration.md against the code: its functions exist, and call those below them in the order of the page."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PROJECT = Path(__file__).parents[2]
_STEP = re.compile(r"^( *)- `([\w.]+):([\w.]+)`")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Step(NamedTuple):
    """A function of the page and those that stand one level below it."""

    module: str
    name: str
    below: tuple[str, ...]


def _steps(text: str) -> list[Step]:
    found = [(len(m[1]) // 4, m[2], m[3]) for line in text.splitlines() if (m := _STEP.match(line))]
    steps = []
    for index, (depth, module, name) in enumerate(found):
        below = []
        for inner, _, function in found[index + 1 :]:
            if inner <= depth:
                break
            if inner == depth + 1:
                below.append(function.rpartition(".")[2])
        steps.append(Step(module, name, tuple(below)))
    return steps


def _function(module: str, name: str) -> Function:
    """Raises LookupError where there is none."""
    path = PROJECT / f"{module.replace('.', '/')}.py"
    scope: ast.AST = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        inside = [node for node in ast.iter_child_nodes(scope) if isinstance(node, kinds) and node.name == part]
        if not inside:
            raise LookupError(f"{module}:{name} does not exist")
        scope = inside[0]
    assert isinstance(scope, Function)
    return scope


def _mentions(function: Function) -> Iterator[str]:
    """Names that a function calls or hands on, in the order of its lines; remote calls hand methods on by name."""
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    named = [node for node in nodes if isinstance(node, ast.Name | ast.Attribute | ast.Constant)]
    for node in sorted(named, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node.value, str):
            yield node.value


def _check_order(step: Step) -> None:
    """Raises LookupError where a name is missing, or comes before the one that stands above it."""
    rest = list(_mentions(_function(step.module, step.name)))
    for name in step.below:
        if name not in rest:
            raise LookupError(f"{step.module}:{step.name} does not call {name}, or not in this place")
        rest = rest[rest.index(name) :]


_PAGE = _steps((PROJECT / "docs/one_iteration.md").read_text())


@pytest.mark.parametrize("step", _PAGE, ids=lambda step: f"{step.module}:{step.name}")
def test_a_function_of_the_page_exists_and_calls_those_below_it(step):
    _function(step.module, step.name)
    _check_order(step)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["- `actor.trainer:Trainer.trian`"], "does not exist"),
        (["- `actor.no_such_module:train`"], "does not exist"),
        (["- `actor.trainer:Trainer.accumulate`", "    - `actor.trainer:Trainer.logprobs`"], "does not call logprobs"),
        (
            [
                "- `actor.trainer:Trainer.accumulate`",
                "    - `actor.passes:forward_backward`",
                "    - `actor.optimizer:Optimizer.zero_gradients`",
            ],
            "not in this place",
        ),
    ],
)
def test_another_name_or_order_is_noticed(lines, words):
    step = _steps("\n".join(lines))[0]
    with pytest.raises(LookupError, match=words):
        _function(step.module, step.name)
        _check_order(step)
