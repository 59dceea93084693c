"""Weights pass from the actor's process to another one through device memory that both have open."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from buffer_reader import read_rounds
from model_support import fuse_experts, read_tensors
from train_support import in_module_worker, run_processes, write_policy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA IPC has no other device")


@pytest.mark.parametrize("architecture", ["dense", "moe"])
def test_what_is_read_is_what_was_sent(tmp_path, architecture):
    path = write_policy(tmp_path, architecture)
    letters = {"one": tmp_path / "letter"}
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read_rounds, letters, "cuda")
        sent = run_processes(
            1, in_module_worker, "weight_workers", "send_through_buffers", path, {"one": {}}, [letters]
        )[0]["one"]
    (first, first_sums), (second, second_sums) = reading.result()["one"]
    assert [report.checksums for report in sent] == [first_sums, second_sums]
    for name, tensor in fuse_experts(read_tensors(path)).items():
        rounded = tensor.bfloat16()
        assert np.array_equal(first[name], rounded.float().numpy()), name
        assert np.array_equal(second[name], (2 * rounded).float().numpy()), name
