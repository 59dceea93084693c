"""On a machine with all packages, none of the replaced parts is skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlpipe.estimate.gpu_generations import has_flash_attention_3

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only there are all packages")

PROJECT = Path(__file__).parents[2]


def test_all_packages_are_here_and_as_they_were_read():
    command = [sys.executable, "scripts/replaced_parts.py"]
    path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, cwd=PROJECT, env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert "not here: " not in done.stdout, done.stdout
    assert done.returncode == 0, done.stdout


def test_flash_attention_3_is_where_it_is_said_to_be():
    looked = "from rollout.sglang_patches.attention_kernel import supported_attention; print(supported_attention()[0])"
    done = subprocess.run([sys.executable, "-c", looked], cwd=PROJECT, capture_output=True, text=True, check=True)
    hopper = torch.cuda.get_device_capability()[0] == 9
    assert (done.stdout.split()[-1] == "None") == (not hopper or has_flash_attention_3())
