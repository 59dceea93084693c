"""Programs of the tests that import SGLang, which never comes into pytest's own process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rollout.engine_environment import engine_environment


def answer_of(worker: Path, folder: Path) -> Any:
    """What `worker` prints last, as JSON; it runs with the variables of a CPU engine, whose files go to `folder`."""
    variables = os.environ | engine_environment("cpu", 1, folder, os.environ)
    done = subprocess.run([sys.executable, worker], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
