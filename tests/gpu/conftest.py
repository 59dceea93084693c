"""Lets these tests use the helpers of other rooms' tests."""

import os
import sys
from pathlib import Path

for room in ("actor", "plan", "rlpipe", "rollout"):
    sys.path.append(str(Path(__file__).parents[1] / room))
# Not every host of several GPUs supports NVLink multicast, and nothing here is about it.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
