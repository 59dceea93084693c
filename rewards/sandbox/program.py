"""Run a Python program in a sandbox. What it isolates, and what not, is in docs/rewards.md."""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rlpipe.shared.errors import ResourceError

Isolation = Literal["required", "best_effort"]

_ENTER = Path(__file__).with_name("enter.py")
_INSIDE = Path(__file__).with_name("inside")
_START_SECONDS = 20.0
_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Limits:
    """Limits of one program. Memory is per process, so that all of it is at most `memory_bytes` x `processes`."""

    wall_seconds: float = 6.0
    memory_bytes: int = 2**29
    processes: int = 16
    file_bytes: int = 2**24
    work_bytes: int = 2**26
    output_bytes: int = 2**20


@dataclass(frozen=True)
class Outcome:
    """How a program ended. `exit_code` is negative for a signal; above 128 it may be 128 + signal."""

    exit_code: int
    timed_out: bool
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Program:
    """Python source with its standard input and other files beside it."""

    source: str
    stdin: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


class NotPermitted(ResourceError):
    """The machine permits no namespaces."""


def run_python(program: Program, limits: Limits, isolation: Isolation = "required") -> Outcome:
    """Run `program` with this interpreter. Raises ResourceError if the sandbox cannot be built."""
    return _launch(program, limits, _with_namespaces(isolation))


def run_tests(program: Program, test: str, limits: Limits, isolation: Isolation = "required") -> Outcome:
    """Run the source `test`, which uses what `program` defines, in a process beside it that the program cannot reach.

    The outcome is that of the tests: exit code 0 if and only if they passed. Raises like `run_python`.
    """
    word = secrets.token_hex(16)
    outcome = _launch(program, limits, _with_namespaces(isolation), json.dumps({"test": test, "word": word}))
    if outcome.exit_code == 0 and not outcome.stdout.endswith(f"{word}\n"):
        return replace(outcome, exit_code=1, stderr="the tests ended early")
    return outcome


def namespaces_work() -> bool:
    """Whether this machine lets us make namespaces. Raises ResourceError if it does but the sandbox cannot be built."""
    return not _missing_permission()


@cache
def _missing_permission() -> str:
    """Why this machine permits no namespaces, empty if it does; tried once per process."""
    try:
        outcome = _launch(Program("print(6 * 7)"), Limits(wall_seconds=_START_SECONDS), namespaces=True)
    except NotPermitted as error:
        return str(error)
    if outcome.stdout != "42\n":
        raise ResourceError(f"the sandbox was built, but {sys.executable} does not run in it: {outcome.stderr[-300:]}")
    return ""


def _with_namespaces(isolation: Isolation) -> bool:
    if not namespaces_work() and isolation == "required":
        raise NotPermitted(
            f"the sandbox needs namespaces, which this machine does not permit ({_missing_permission()}): allow "
            "unprivileged user namespaces (or give the container SYS_ADMIN), or set the option isolation to best_effort"
        )
    return namespaces_work()


def _launch(program: Program, limits: Limits, namespaces: bool, judged: str | None = None) -> Outcome:
    """judged: the request to the tests' process, where there is one."""
    judge = None if judged is None else {"arguments": _inside("judge", "judge"), "stdin": judged}
    files = {**program.files, "main.py": program.source}
    own = _inside("serve", "run_once" if judge is None else "serve")
    return _enter({"arguments": own, "judge": judge, "files": files, "stdin": program.stdin}, limits, namespaces)


def run_command(command: str, files: Mapping[str, str], limits: Limits, isolation: Isolation = "required") -> Outcome:
    """Run a shell command in a folder with `files`. It may start programs of the system and of this Python.

    Raises like `run_python`.
    """
    program = {"arguments": ["/bin/sh", "-c", command], "judge": None, "files": dict(files), "stdin": ""}
    path = os.pathsep.join([os.path.join(sys.prefix, "bin"), _ENVIRONMENT["PATH"]])
    return _enter({**program, "environment": {**_ENVIRONMENT, "PATH": path}}, limits, _with_namespaces(isolation))


def _enter(asked: Mapping[str, Any], limits: Limits, namespaces: bool) -> Outcome:
    """asked: what is to run; the rest of the launcher's request is added."""
    request = {
        "environment": _ENVIRONMENT,
        "namespaces": namespaces,
        "visible": _visible(),
        "limits": _resource_limits(limits, namespaces),
        "wall_seconds": limits.wall_seconds,
        "work_bytes": limits.work_bytes,
        "output_bytes": limits.output_bytes,
        **asked,
    }
    launcher = subprocess.run(
        [sys.executable, "-I", "-S", str(_ENTER)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=limits.wall_seconds + _START_SECONDS,
        start_new_session=True,
        env={},
    )
    if launcher.returncode != 0:
        raise ResourceError(f"the sandbox could not be built: {launcher.stderr.strip()[-300:]}")
    answer = json.loads(launcher.stdout)
    if refusal := answer.pop("not_permitted", ""):
        raise NotPermitted(refusal)
    if failure := answer.pop("set_up_failure"):
        raise ResourceError(f"the sandbox could not be built: {failure}")
    return Outcome(**answer)


def _visible() -> list[str]:
    """Folders of the system and of this Python, under their names and where links lead."""
    own = [sys.base_prefix, sys.prefix, *(os.path.realpath(path) for path in (sys.base_prefix, sys.prefix))]
    return sorted({*_SYSTEM_FOLDERS, *own})


def _inside(module: str, call: str) -> list[str]:
    """Arguments that call a function of `inside`, handed over as text, so that no folder of ours is visible."""
    return [sys.executable, "-I", "-c", _source(module) + f"{module}.{call}()\n", "main.py"]


@cache
def _source(last: str) -> str:
    lines = ["import sys, types\n"]
    for module in ("confine", "wire", last):
        text = (_INSIDE / f"{module}.py").read_text()
        lines.append(f"sys.modules[{module!r}] = {module} = types.ModuleType({module!r})\n")
        lines.append(f"exec(compile({text!r}, {module!r}, 'exec'), {module}.__dict__)\n")
    return "".join(lines)


def _resource_limits(limits: Limits, namespaces: bool) -> dict[str, int]:
    # Without namespaces an ordinary user's processes are counted together with all its others, so none may be added.
    processes = limits.processes if namespaces or os.geteuid() == 0 else 1
    return {
        "RLIMIT_CPU": int(limits.wall_seconds) + 1,
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_NPROC": processes,
        "RLIMIT_CORE": 0,
    }
