"""Requests are drawn with filters as long as one of their batch asks for it, in SGLang's own batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

from rollout.engine_environment import engine_environment

WORKER = Path(__file__).with_name("sampling_kinds_worker.py")


def test_a_filtered_request_that_has_ended_slows_no_other(tmp_path):
    environment = os.environ | engine_environment("cpu", 1, tmp_path, os.environ)
    done = subprocess.run([sys.executable, WORKER], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("plain") == [False, False, False, 2]
    assert found == dict.fromkeys(("greedy", "top_p", "top_k"), [True, True, False, 2])
