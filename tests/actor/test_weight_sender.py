"""Weights that leave the actor arrive bit by bit in a process outside its own process group."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch.distributed as dist
from buffer_reader import accept, read_buckets, read_rounds
from model_support import fuse_experts, read_tensors
from train_support import in_module_worker, run_processes, write_policy

from rlpipe.shared.weights import WeightGroup

LAYOUTS = {"ep2": {"expert": 2}, "pp2": {"pipeline": 2}, "tp2_sp": {"tensor": 2, "sequence": True}}
EIGHT = [{"tensor": 2, "sequence": True, "expert": 2, "pipeline": 2}, {"tensor": 4, "sequence": True, "expert": 4}]


@pytest.fixture(scope="module")
def transfers(tmp_path_factory):
    path = write_policy(tmp_path_factory.mktemp("policies"), "moe")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = {name: group_of(f"test-{name}", store, (0, 1), 1) for name in LAYOUTS}
    with ThreadPoolExecutor() as pool:
        engine = ("weight_workers", "receive_twice", path, LAYOUTS, groups, 2)
        receiving = pool.submit(run_processes, 1, in_module_worker, *engine)
        sent = run_processes(2, in_module_worker, "weight_workers", "send_twice", path, LAYOUTS, groups)
        return path, sent, receiving.result()[0]


def group_of(name, store, senders, readers):
    return WeightGroup(name, ("127.0.0.1",), store.port, senders, readers, "gloo", 5 * 20_000)


def assert_times(values, path, factor):
    wanted = {name: factor * tensor.numpy() for name, tensor in read_tensors(path).items()}
    assert values.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert np.array_equal(values[name], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_hold_every_number_bit_by_bit(transfers, layout):
    path, _, received = transfers
    first, second, *_ = received[layout]
    assert_times(first, path, 1)
    assert_times(second, path, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reports_have_the_bytes_and_the_checksums_asked_for(transfers, layout):
    path, sent, received = transfers
    plan, _, error = sent[0][layout]
    assert "no weight group was joined" in error
    verified, plain = zip(*(process[layout][1] for process in sent), strict=True)
    sums = received[layout][2]
    for rank, report in enumerate(verified):
        own = [bucket.sender == rank for bucket in plan]
        assert report.checksums == tuple(one if is_own else "" for one, is_own in zip(sums, own, strict=True))
        assert report.size_bytes == sum(bucket.size_bytes for bucket in plan if bucket.sender == rank)
        assert report.seconds > 0 and not report.failure
    assert all(report.checksums == ("",) * len(plan) for report in plain)
    assert sum(report.size_bytes for report in verified) == sum(one.nbytes for one in read_tensors(path).values())


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """Eight processes send to two engines, of which one ends in the second of four updates."""
    folder = tmp_path_factory.mktemp("lost")
    path = write_policy(folder, "moe")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = [
        group_of(name, store, senders, readers)
        for name, senders, readers in (("both", (0, 1, 4, 5), 2), ("one", (0, 1, 4, 5), 1), ("other", range(4), 1))
    ]
    with ThreadPoolExecutor() as pool:
        engine = ("weight_workers", "receive_beside_a_lost_engine", path, EIGHT, groups, 8, folder / "lost")
        receiving = pool.submit(run_processes, 1, in_module_worker, *engine)
        sender = ("weight_workers", "send_to_a_lost_engine", path, EIGHT, groups, folder / "lost")
        return path, run_processes(8, in_module_worker, *sender), receiving.result()[0]


def test_an_engine_lost_in_an_update_is_noticed_by_all_and_the_next_update_is_whole(lost):
    path, sent, received = lost
    whole, broken, healed, resharded = received["answers"]
    assert received["exit"] == 7
    assert "bucket" in broken.failure and received["has_left"]
    assert not any((whole.failure, healed.failure, resharded.failure))
    for factor, values in zip((1, 2, 1), received["values"], strict=True):
        assert_times(values, path, factor)
    for rank, process in enumerate(sent):
        first, second, third, fourth = process["reports"]
        assert not any((first.failure, third.failure, fourth.failure))
        assert bool(second.failure) == (rank in (0, 1, 4, 5)), rank
    for number, answer in ((0, whole), (2, healed), (3, resharded)):
        sums = zip(*(process["reports"][number].checksums for process in sent), strict=True)
        assert tuple(map(max, sums)) == answer.checksums


def test_bytes_go_from_those_that_hold_them_and_nowhere_else(lost):
    path, sent, _ = lost
    total = sum(tensor.nbytes for tensor in read_tensors(path).values())
    sizes = [process["reports"][0].size_bytes for process in sent]
    assert sum(sizes) == total
    assert [size > 0 for size in sizes] == [True, True, False, False] * 2
    assert max(sizes) < 0.3 * total  # about a quarter each
    for rank, process in enumerate(sent):
        # To two engines, and whole tensors from the other tensor-parallel rank: no stage and no expert-parallel rank
        # sends another one anything.
        assert process["exchanges"].keys() <= {("broadcast", 3), ("gather", 2)}
        assert process["exchanges"]["broadcast", 3] == sizes[rank]
        assert process["exchanges"]["gather", 2] < total / 2
    assert not sum((process["exchanges"] for process in sent[2:4] + sent[6:]), start=sent[2]["exchanges"]).total()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_ask_for_as_much_ahead_as_they_have_room_for(transfers, layout):
    _, sent, received = transfers
    most, largest = received[layout][3], max(bucket.size_bytes for bucket in sent[0][layout][0])
    assert 3 * 20_000 < most <= max(5 * 20_000, largest)


def test_buckets_respect_the_limit_unless_one_tensor_is_larger(transfers):
    _, sent, _ = transfers
    plan = sent[0]["ep2"][0]
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
        source.leave("ValueError: no such parameter" if letter.name == "error" else "")

    with ThreadPoolExecutor() as pool:
        reading = pool.submit(lambda: [fail_in_the_second_bucket(letter) for letter in letters])
        answers = run_processes(1, in_module_worker, "weight_workers", "send_to_failing_readers", path, letters)
        reading.result()
    ((failed, ended),) = answers
    assert "could not load a weight bucket: ValueError: no such parameter" in failed
    assert "is gone" in ended
