"""A planted defect: a small change to the source of one module, and the test that has to see it."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[2]
_HOOK = Path(__file__).parent / "hook"
_DEADLINE_SECONDS = 900


@dataclass(frozen=True)
class Defect:
    """`old` stands once in `file`, below the project, and becomes `new`. `test`: a pytest node id below `tests/`;
    `only`: which of its parameters, as pytest's -k takes it."""

    name: str
    file: str
    old: str
    new: str
    test: str
    only: str = ""

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").replace("/", ".")

    @property
    def source(self) -> str:
        return (PROJECT / self.file).read_text()


@dataclass(frozen=True)
class Outcome:
    """What pytest said of the test: `failed` says that it ran and failed; `planted`: some process had the defect."""

    failed: bool
    planted: bool
    output: str


def run_with(defect: Defect, folder: Path) -> Outcome:
    """Run the defect's test in a process of its own, with the defect in it and in all that it starts."""
    marks = folder / "marks"
    marks.mkdir()
    planted = {"module": defect.module, "file": str(PROJECT / defect.file), "old": defect.old, "new": defect.new}
    search = os.pathsep.join([str(_HOOK), str(PROJECT)])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", f"tests/{defect.test}"]
    done = subprocess.run(
        [*command, *(["-k", defect.only] if defect.only else [])],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": search, "RLPIPE_PLANTED": json.dumps(planted | {"marks": str(marks)})},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_SECONDS,
        check=False,
    )
    output = done.stdout + done.stderr
    # Some checks run in a fixture that several tests share.
    failed = done.returncode == 1 and re.search(rf"^(FAILED|ERROR) tests/{defect.test}", output, re.MULTILINE)
    return Outcome(bool(failed), any(marks.iterdir()), output)
