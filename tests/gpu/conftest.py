"""Lets these tests use the helpers of other rooms' tests, and each file the whole GPU."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

for room in ("actor", "plan", "rlpipe", "rollout"):
    sys.path.append(str(Path(__file__).parents[1] / room))
# Not every host of several GPUs supports NVLink multicast, and nothing here is about it.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


@pytest.fixture(autouse=True, scope="module")
def no_memory_kept_for_this_process() -> Iterator[None]:
    """What torch keeps for tests of this process is not there for the processes that other files' tests start."""
    yield
    torch.cuda.empty_cache()
