"""A planted defect: a small change to the source of one module, and the test that has to see it."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]
_HOOK = Path(__file__).parent / "hook"
_DEADLINE_SECONDS = 900
_OWN = {"AssertionError", "Failed", "RlpipeError"}
"""What a test raises that looked and saw: an assertion, `pytest.raises`, `pytest.fail`, or an error of the project."""
_FROM_ELSEWHERE = {"ProcessRaisedException", "CalledProcessError", "RayTaskError", "RuntimeError", "TaskError"}
"""What carries the text of another process's exception."""
_RAISED = re.compile(
    r"^(?:E\s+)?(?:\S+: )?(?:[A-Za-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Failed|Exit))\b", re.MULTILINE
)
_SHOWN_CHARACTERS = 160


@dataclass(frozen=True)
class Defect:
    """`old` stands once in `file`, below the project, and becomes `new`. `test`: a pytest node id below `tests/`;
    `only`: which of its parameters, as pytest's -k takes it. `error`: what else than an assertion or an error of the
    project the test may show it by, where the code that fails is a library's or Python's own."""

    name: str
    file: str
    old: str
    new: str
    test: str
    only: str = ""
    error: str = ""

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").replace("/", ".")

    @property
    def source(self) -> str:
        return (PROJECT / self.file).read_text()


@dataclass(frozen=True)
class PytestRun:
    """What pytest said of a test, in a process of its own.

    reports: of the phases, as tests/planted/hook/planted_reports.py writes them. planted: some process had the defect.
    """

    reports: tuple[dict[str, Any], ...]
    planted: bool
    seconds: float
    output: str
    timed_out: bool = False

    @property
    def passed(self) -> bool:
        """At least one test ran, and none failed."""
        called = [report["outcome"] for report in self.reports if report["phase"] == "call"]
        return "passed" in called and not self.failures and not self.timed_out

    @property
    def failures(self) -> list[dict[str, Any]]:
        return [report for report in self.reports if report["outcome"] == "failed"]

    @property
    def failed_by(self) -> str:
        """How it ended; empty where it passed."""
        return "" if self.passed else self.last_lines

    @property
    def last_lines(self) -> str:
        return " | ".join(line for line in self.output.splitlines()[-3:] if line.strip())[:_SHOWN_CHARACTERS]


@dataclass(frozen=True)
class Attempt:
    """What became of a defect's test. fails_without: how the test ends with no defect, empty where it passes. failure:
    the first report that failed. The rest is of the run with the defect."""

    defect: str
    fails_without: str
    planted: bool
    timed_out: bool
    failure: dict[str, Any] | None
    last_lines: str
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """Whether a defect was seen, and by what."""

    seen: bool
    reason: str


def run_test(test: str, only: str, folder: Path, environment: Mapping[str, str] | None = None) -> PytestRun:
    """Run a test below `tests/`. folder: empty. environment: of `environment_of`, with a defect."""
    marks, reports = folder / "marks", folder / "reports.jsonl"
    marks.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "planted_reports", "-m", ""]
    variables = {
        **os.environ,
        "PYTHONPATH": _search_path(),
        "RLPIPE_REPORTS": str(reports),
    }
    begin = time.monotonic()
    timed_out = False
    try:
        done = subprocess.run(
            [*command, f"--basetemp={folder}/temporary", f"tests/{test}", *(["-k", only] if only else [])],
            cwd=PROJECT,
            env={**variables, **(environment or {"RLPIPE_PLANTED": ""})},
            capture_output=True,
            text=True,
            timeout=_DEADLINE_SECONDS,
            check=False,
        )
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        output, timed_out = str(error), True
    rows = [json.loads(line) for line in reports.read_text().splitlines()] if reports.exists() else []
    return PytestRun(tuple(rows), any(marks.iterdir()), time.monotonic() - begin, output, timed_out)


def run_without(test: str, only: str) -> PytestRun:
    """The test with no defect, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return run_test(test, only, Path(folder))


def environment_of(defect: Defect, marks: Path) -> dict[str, str]:
    """Variables that plant the defect into a process and all that it starts; each leaves a file in `marks`."""
    planted = {"module": defect.module, "file": str(PROJECT / defect.file), "old": defect.old, "new": defect.new}
    return {"PYTHONPATH": _search_path(), "RLPIPE_PLANTED": json.dumps(planted | {"marks": str(marks)})}


def _search_path() -> str:
    """The hook first; packages may be where only the caller's path leads."""
    return os.pathsep.join(filter(None, [str(_HOOK), str(PROJECT), os.environ.get("PYTHONPATH")]))


def attempt(defect: Defect, fails_without: str = "") -> Attempt:
    """Run the defect's test with it. fails_without: how the test ends with no defect, empty where it passes."""
    with tempfile.TemporaryDirectory() as name:
        marks = Path(name) / "marks"
        marks.mkdir()
        run = run_test(defect.test, defect.only, Path(name), environment_of(defect, marks))
    return Attempt(
        defect.name,
        fails_without,
        run.planted,
        run.timed_out,
        run.failures[0] if run.failures else None,
        run.last_lines,
        run.seconds,
    )


def verdict_on(tried: Attempt, other_error: str) -> Verdict:
    """Whether what the test raised is its own: no import, time limit or crash on the way to what it looks at."""
    if tried.fails_without:
        return Verdict(False, f"its test does not pass without it: {tried.fails_without}")
    if not tried.planted:
        return Verdict(False, "no process imported its module")
    if tried.timed_out:
        return Verdict(False, f"its test took longer than {_DEADLINE_SECONDS} seconds")
    if tried.failure is None:
        return Verdict(False, f"its test does not see it: {tried.last_lines}")
    failure = tried.failure
    classes, message = failure.get("classes", []), failure.get("message", "")
    kind = classes[0] if classes else failure["phase"]
    inner = raised_elsewhere(classes, message) or raised_elsewhere(classes, failure.get("captured", ""))
    place = " in a fixture" if failure["phase"] == "setup" else ""
    shown = " ".join(_shown(message).split())[:_SHOWN_CHARACTERS]
    reason = f"{kind}{f' of {inner}' if inner else ''}{place}: {shown}"
    if failure["phase"] == "collect" or (kind == "Failed" and message.startswith("Timeout")):
        return Verdict(False, reason)
    own = {*_OWN, *([other_error] if other_error else [])}
    return Verdict(bool(own & {*classes, inner}), reason)


def raised_elsewhere(classes: list[str], message: str) -> str:
    """The last class of exception in the text that another process left; empty where this process raised its own."""
    if not set(classes) & _FROM_ELSEWHERE:
        return ""
    names = [name for name in _RAISED.findall(message) if name not in _FROM_ELSEWHERE]
    return names[-1] if names else ""


def _shown(message: str) -> str:
    """Its first line, or where that is another process's traceback, the last."""
    lines = [line for line in message.splitlines() if line.strip()]
    return (lines[-1] if "Traceback" in message else lines[0]) if lines else ""
