"""Every wait for Ray has a limit: `ray.get` has a timeout, or what it takes is there already."""

import ast
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[2]
# Functions that only take what `ray.wait` has named ready.
_READY = {
    "actor/worker.py:_any_failed",
    "rlpipe/shared/remote.py:gather",
    "rollout/engine_calls.py:_answers",
    "rollout/supervisor.py:_follow_start",
    "rollout/supervisor.py:_take_pulse",
}


def _unlimited_waits() -> Iterator[str]:
    for package in ("rlpipe", "actor", "rollout", "rewards"):
        for path in sorted((PROJECT / package).rglob("*.py")):
            for function in ast.walk(ast.parse(path.read_text())):
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and _waits_unlimited(function):
                    yield f"{path.relative_to(PROJECT)}:{function.name}"


def _waits_unlimited(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    waits = [call for call in calls if ast.unparse(call.func) in ("ray.get", "ray.wait")]
    return any("timeout" not in {keyword.arg for keyword in wait.keywords} for wait in waits)


def test_every_wait_for_ray_has_a_limit_or_takes_what_is_there():
    assert set(_unlimited_waits()) == _READY
