"""Run a Python program in a sandbox. What it isolates, and what not, is in docs/rewards.md."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from rlpipe.shared.errors import ResourceError

Isolation = Literal["required", "best_effort"]

_ENTER = Path(__file__).with_name("enter.py")
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


def run_python(program: Program, limits: Limits, isolation: Isolation = "required") -> Outcome:
    """Run `program` with this interpreter. Raises ResourceError if the sandbox cannot be built."""
    namespaces = namespaces_work()
    if not namespaces and isolation == "required":
        raise ResourceError(
            "the sandbox needs namespaces, which this machine does not permit: allow unprivileged user namespaces (or "
            "give the container SYS_ADMIN), or set the option isolation to best_effort"
        )
    return _launch(program, limits, namespaces)


@cache
def namespaces_work() -> bool:
    """Whether this machine lets us make namespaces; tried once per process."""
    try:
        return _launch(Program("print(6 * 7)"), Limits(), namespaces=True).stdout == "42\n"
    except ResourceError:
        return False


def _launch(program: Program, limits: Limits, namespaces: bool) -> Outcome:
    request = {
        "arguments": [sys.executable, "-I", "main.py"],
        "files": {**program.files, "main.py": program.source},
        "stdin": program.stdin,
        "environment": _ENVIRONMENT,
        "namespaces": namespaces,
        "visible": sorted({*_SYSTEM_FOLDERS, sys.base_prefix, sys.prefix}),
        "limits": _resource_limits(limits, namespaces),
        "wall_seconds": limits.wall_seconds,
        "work_bytes": limits.work_bytes,
        "output_bytes": limits.output_bytes,
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
    if failure := answer.pop("set_up_failure"):
        raise ResourceError(f"the sandbox could not be built: {failure}")
    return Outcome(**answer)


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
