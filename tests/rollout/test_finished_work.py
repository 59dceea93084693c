"""Memory is taken from a device when that is done with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from rollout.engine_environment import engine_environment

WORKER = Path(__file__).with_name("finished_work_worker.py")


def test_a_device_is_waited_for_before_each_part_of_its_memory_goes(tmp_path):
    environment = os.environ | engine_environment("cpu", 1, tmp_path, os.environ)
    done = subprocess.run([sys.executable, WORKER], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    order = json.loads(done.stdout.splitlines()[-1])
    taken = ["unmap kv_cache", "copy buffers", "unmap weights", "unmap cuda_graph"]
    assert [step for step in order if step != "wait"] == taken
    for at, step in enumerate(order):
        assert not step.startswith("unmap") or order[at - 1] == "wait", order
