"""Programs, judged by running tests on them in a sandbox."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rewards.answers.extract import after_thinking
from rewards.sandbox.program import Isolation, Limits, Outcome, Program, namespaces_work, run_python, run_tests
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.sample import Reward

Score = Literal["all", "share"]
_BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


def code(
    response: str,
    label: str,
    score: Score = "all",
    wall_seconds: PositiveFloat = 6.0,
    memory_bytes: Annotated[int, Field(ge=2**26)] = 2**29,
    processes: PositiveInt = 16,
    isolation: Isolation = "required",
) -> Reward:
    """1 if the last code block of the response passes the label's tests, else 0; with `score: share` the share passed.

    The label is either Python source with assertions, run after the program (as in MBPP, arXiv 2108.07732, and
    HumanEval, arXiv 2107.03374), a JSON list of such sources, or JSON `{"inputs": [...], "outputs": [...]}` of standard
    input and expected output (as in APPS, arXiv 2105.09938; lines are compared without trailing blanks). Each test is
    a run of its own within `wall_seconds`. Raises ResourceError if the sandbox cannot be built and ValueError for a
    label of another form.
    """
    source = last_code_block(after_thinking(response))
    if source is None:
        return Reward(0.0, False, "no code block", {"format": 0.0})
    limits = Limits(wall_seconds=wall_seconds, memory_bytes=memory_bytes, processes=processes)
    passed = 0
    failure = ""
    tests = _tests(label)
    for number, (test, expected) in enumerate(tests, start=1):
        problem = _problem(source, test, expected, limits, isolation)
        passed += problem is None
        failure = failure or (f"; test {number} {problem}" if problem else "")
        if problem and score == "all":
            break
    correct = passed == len(tests)
    value = passed / len(tests) if score == "share" else float(correct)
    return Reward(value, correct, f"{passed} of {len(tests)} tests passed{failure}", {"format": 1.0})


def check_code(isolation: Isolation = "required", **_: object) -> None:
    """Raise ConfigError if this machine cannot isolate programs as demanded."""
    if isolation == "required" and not namespaces_work():
        raise ConfigError(
            "grader 'code' needs namespaces, which this machine does not permit: allow unprivileged user namespaces, "
            "or set its option isolation to best_effort (docs/rewards.md says what is lost)"
        )


def last_code_block(text: str) -> str | None:
    """The content of the last fenced Python block; an unclosed one counts."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


def _tests(label: str) -> list[tuple[str, str | None]]:
    """Pairs of (assertions, None) or (standard input, expected output)."""
    values = _parsed(label)
    if isinstance(values, str):
        return [(values, None)]
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return [(value, None) for value in values]
    if isinstance(values, Mapping) and len(values.get("inputs", ())) == len(values.get("outputs", ())) > 0:
        return [(str(given), str(wanted)) for given, wanted in zip(values["inputs"], values["outputs"], strict=True)]
    raise ValueError(f"the label {label[:100]!r} is neither source, a list of sources nor inputs with as many outputs")


def _parsed(label: str) -> object:
    """A label that was a list or object in its row arrives as JSON, or as Python writes it."""
    if label.lstrip()[:1] not in ("[", "{"):
        return label
    try:
        return json.loads(label)
    except ValueError:
        return ast.literal_eval(label)


def _problem(source: str, test: str, expected: str | None, limits: Limits, isolation: Isolation) -> str | None:
    if expected is not None:
        outcome = run_python(Program(source, stdin=test), limits, isolation)
        return _describe(outcome) or (None if _lines(outcome.stdout) == _lines(expected) else "printed something else")
    return _describe(run_tests(Program(source), test, limits, isolation))


def _describe(outcome: Outcome) -> str | None:
    if outcome.timed_out:
        return "took too long"
    if outcome.exit_code == 0:
        return None
    last = outcome.stderr.strip().splitlines()[-1:] or [f"exit code {outcome.exit_code}"]
    return f"failed: {last[0][:120]}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
