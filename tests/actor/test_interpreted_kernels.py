"""The arithmetic of Triton kernels without a GPU, where Triton is installed; it comes with torch for CUDA."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("interpreted_kernels.py")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="torch for CPUs comes without triton")
def test_kernels_compute_what_plain_torch_computes():
    """In a process of its own: whether kernels are interpreted is read when they are defined."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
