"""Weights that leave the actor arrive bit by bit in a process outside its own process group."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from buffer_reader import accept, read_buckets, read_rounds
from model_support import fuse_experts, read_tensors
from train_support import in_module_worker, run_processes, write_policy

from rlpipe.shared.weights import WeightGroup

LAYOUTS = {"ep2": {"expert": 2}, "pp2": {"pipeline": 2}, "tp2_sp": {"tensor": 2, "sequence": True}}


@pytest.fixture(scope="module")
def transfers(tmp_path_factory):
    path = write_policy(tmp_path_factory.mktemp("policies"), "moe")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = {name: WeightGroup(f"test-{name}", ("127.0.0.1",), store.port, 2, "gloo") for name in LAYOUTS}
    with ThreadPoolExecutor() as pool:
        receiving = pool.submit(run_processes, 1, in_module_worker, "weight_workers", "receive_twice", path, groups)
        sent = run_processes(2, in_module_worker, "weight_workers", "send_twice", path, LAYOUTS, groups)
        return path, sent[0], receiving.result()[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_arrives_under_its_hugging_face_name(transfers, layout):
    path, _, received = transfers
    wanted = {name: tensor.numpy() for name, tensor in fuse_experts(read_tensors(path)).items()}
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


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Sent and read by two processes, of which each has a reader of its own."""
    path, folder = write_policy(tmp_path_factory.mktemp("policies"), "moe"), tmp_path_factory.mktemp("letters")
    letters = [{name: folder / f"{name}-{rank}" for name in LAYOUTS} for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        reading = [pool.submit(read_rounds, own, "cpu") for own in letters]
        sent = run_processes(2, in_module_worker, "weight_workers", "send_through_buffers", path, LAYOUTS, letters)
        return path, sent, [one.result() for one in reading]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_process_fills_the_buffers_with_the_whole_policy(shared, layout):
    path, sent, read = shared
    wanted = {name: tensor.bfloat16() for name, tensor in fuse_experts(read_tensors(path)).items()}
    for reader, sender in zip(read, sent, strict=True):
        (first, first_sums), (second, second_sums) = reader[layout]
        assert first.keys() == wanted.keys()
        for name, values in wanted.items():
            assert np.array_equal(first[name], values.float().numpy()), name
            assert np.array_equal(second[name], (2 * values).float().numpy()), name
        assert [report.checksums for report in sender[layout]] == [first_sums, second_sums]
    assert read[0][layout][0][1] == read[1][layout][0][1]


def test_a_reader_that_fails_or_ends_stops_the_sender_with_its_reason(tmp_path):
    path = write_policy(tmp_path, "dense")
    letters = [tmp_path / "error", tmp_path / "end"]

    def fail_in_the_second_bucket(letter):
        source, plan = accept(letter, "cpu")
        read_buckets(plan[:1], source)
        if letter.name == "error":
            with contextlib.suppress(ValueError), source.bucket(1, torch.bfloat16):
                raise ValueError("no such parameter")
        source.leave()

    with ThreadPoolExecutor() as pool:
        reading = pool.submit(lambda: [fail_in_the_second_bucket(letter) for letter in letters])
        answers = run_processes(1, in_module_worker, "weight_workers", "send_to_failing_readers", path, letters)
        reading.result()
    ((failed, ended),) = answers
    assert "could not load a weight bucket: ValueError: no such parameter" in failed
    assert "is gone" in ended
