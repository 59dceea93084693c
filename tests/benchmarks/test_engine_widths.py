"""The benchmark of engines' widths runs both on a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_narrow_and_wide_engines_are_measured_beside_their_plan(tmp_path):
    sizes = "--tiny --gpus 2 --widths 1,2,4 --requests 16 --tokens 8 --rounds 1"
    command = [sys.executable, "benchmarks/engine_widths.py", *sizes.split(), "--folder", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines() if re.fullmatch(r"[ \d.,]+", line)]
    assert [line[:2] for line in lines] == [["2", "1"], ["1", "2"]]
    assert all(float(value.replace(",", "")) > 0 for line in lines for value in line[2:])
    assert not list(tmp_path.iterdir())
