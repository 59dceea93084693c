"""Programs of the tests that import SGLang, which never comes into pytest's own process."""

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollout.engine_environment import engine_environment

_SERVER = Path(__file__).with_name("engine_worker_server.py")


def answer_of(worker: Path, folder: Path, *arguments: str) -> Any:
    """What `worker` prints last, as JSON. It runs with the variables of a CPU engine, in a process forked from one that
    has imported SGLang, which takes ten seconds; what it prints goes to `folder`."""
    server = _server(folder.parent)
    assert server.stdin is not None and server.stdout is not None
    stdout, stderr = folder / "worker_stdout", folder / "worker_stderr"
    print(json.dumps([[str(worker), *arguments], str(stdout), str(stderr)]), file=server.stdin, flush=True)
    assert server.stdout.readline() == "0\n", stderr.read_text() if stderr.exists() else "the server has ended"
    return json.loads(stdout.read_text().splitlines()[-1])


@lru_cache(maxsize=1)
def _server(folder: Path) -> "subprocess.Popen[str]":
    """One for all tests of this process, whose folders lie in `folder`."""
    variables = engine_environment("cpu", 1, folder, os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, _SERVER], env=os.environ | variables, text=True, **pipes)
