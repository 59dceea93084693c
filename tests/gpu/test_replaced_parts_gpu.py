"""On a machine with all packages, none of the replaced parts is skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only there are all packages")

PROJECT = Path(__file__).parents[2]


def test_all_packages_are_here_and_as_they_were_read():
    command = [sys.executable, "scripts/replaced_parts.py"]
    path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, cwd=PROJECT, env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert "not here: " not in done.stdout, done.stdout
    assert done.returncode == 0, done.stdout
