"""Weights that leave the actor arrive bit by bit in a process outside its own process group."""

import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from train_support import in_module_worker, run_processes, write_policy

from rlpipe.weights import WeightGroup

LAYOUTS = {"ep2": {"expert": 2}, "pp2": {"pipeline": 2}, "tp2_sp": {"tensor": 2, "sequence": True}}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def transfers(tmp_path_factory):
    path = write_policy(tmp_path_factory.mktemp("policies"), "moe")
    groups = {name: WeightGroup(f"test-{name}", "127.0.0.1", _free_port(), 2, "gloo") for name in LAYOUTS}
    with ThreadPoolExecutor() as pool:
        receiving = pool.submit(run_processes, 1, in_module_worker, "weight_workers", "receive_twice", path, groups)
        sent = run_processes(2, in_module_worker, "weight_workers", "send_twice", path, LAYOUTS, groups)
        return path, sent[0], receiving.result()[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_arrives_under_its_hugging_face_name(transfers, layout):
    from safetensors.numpy import load_file

    path, _, received = transfers
    wanted = load_file(path / "model.safetensors")
    (first, _), (second, _) = received[layout]
    assert first.keys() == wanted.keys()
    for name, values in wanted.items():
        assert np.array_equal(first[name], values), name
        assert np.array_equal(second[name], 2 * values), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_report_has_the_bytes_and_the_checksums_asked_for(transfers, layout):
    _, sent, received = transfers
    plan, (verified, plain), error = sent[layout]
    assert "no weight group was joined" in error
    assert verified.checksums == tuple(received[layout][0][1])
    assert plain.checksums == ("",) * len(plan)
    assert verified.size_bytes == sum(tensor.nbytes for tensor in received[layout][0][0].values())
    assert verified.seconds > 0


def test_buckets_respect_the_limit_unless_one_tensor_is_larger(transfers):
    _, sent, _ = transfers
    plan = sent["ep2"][0]
    assert len(plan) > 3
    assert all(bucket.size_bytes <= 20_000 or len(bucket.tensors) == 1 for bucket in plan)
