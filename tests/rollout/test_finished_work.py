"""Memory goes back when the device is done with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from rollout.engine_environment import engine_environment

WORKER = Path(__file__).with_name("finished_work_worker.py")


def test_an_engine_waits_for_its_device_before_it_gives_memory_back(tmp_path):
    environment = os.environ | engine_environment("cpu", 1, tmp_path, os.environ)
    done = subprocess.run([sys.executable, WORKER], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    order = json.loads(done.stdout.splitlines()[-1])
    assert order[:3] == ["synchronize", "pause kv_cache", "pause cuda_graph"]
