"""Seeded draws as engines on GPUs make them, with SGLang's own sampler around them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from rollout.engine_environment import engine_environment

WORKER = Path(__file__).with_name("seeded_draw_worker.py")


def test_a_token_does_not_depend_on_filtered_requests_beside_it(tmp_path):
    environment = os.environ | engine_environment("cpu", 1, tmp_path, os.environ) | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([sys.executable, WORKER], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    drawn = json.loads(done.stdout.splitlines()[-1])
    assert drawn["together"] == drawn["alone"]
    plain, filtered, _, greedy = (drawn["ranks"][first::4] for first in range(4))
    assert max(plain) > 20 > max(filtered) and max(greedy) == 0
