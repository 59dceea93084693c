"""MKL's vector functions are chosen before threads share them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actor.vector_math import FUNCTIONS

_OPERATIONS_OF_THE_START = """
import json, torch
from torch.utils._python_dispatch import TorchDispatchMode

class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor):
            self.calls.append((function.overloadpacket.__name__, str(result.dtype), result.numel()))
        return result

from actor.runtime import install_megatron_runtime

with Seen() as seen:
    install_megatron_runtime()
print(json.dumps(seen.calls))
"""


def test_they_are_those_that_this_torch_leaves_to_mkl():
    header = Path(torch.__file__).parent / "include/ATen/cpu/vml.h"
    assert set(re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", header.read_text(), re.MULTILINE)) == set(FUNCTIONS)


@pytest.mark.slow
def test_a_process_of_the_actor_calls_each_of_them_alone_as_it_starts():
    """Which kernel a first call of several threads gets is a race that no test can lose on purpose."""
    done = subprocess.run([sys.executable, "-c", _OPERATIONS_OF_THE_START], capture_output=True, text=True, check=True)
    calls = json.loads(done.stdout.splitlines()[-1])
    for dtype in ("torch.float32", "torch.float64"):
        alone = {name for name, made, elements in calls if made == dtype and elements == 1}
        assert alone >= set(FUNCTIONS)
