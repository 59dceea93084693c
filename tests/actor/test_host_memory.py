"""Memory for optimizer states is made ahead, taken in parts, and given back where nobody takes it."""

import gc

import psutil
import pytest
import torch

from actor import host_memory
from actor.host_memory import HostCopies, HostMemory, host_tensors_like, zero_in_parallel
from rlpipe.shared.errors import ResourceError

MEGABYTE = 2**20
PAGE = 2 * MEGABYTE


@pytest.fixture
def locked(monkeypatch):
    """As on a GPU: what is locked, by its address, without CUDA."""
    found: dict[int, int] = {}

    class Runtime:
        cudaHostUnregister = staticmethod(found.pop)

        @staticmethod
        def cudaHostRegister(address: int, size: int, flags: int) -> int:
            ends = [start + length for start, length in found.items()]
            assert not any(start < address + size and address < end for start, end in zip(found, ends, strict=True)), (
                "locked twice"
            )
            found[address] = size
            return 0

    monkeypatch.setattr(host_memory, "has_transfers", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    return found


def _resident() -> int:
    return psutil.Process().memory_info().rss


def test_tensors_lie_in_what_was_made_ahead_one_behind_the_other(locked):
    memory = HostMemory(8 * PAGE)
    first, second = memory.zeros(PAGE + 5, torch.bfloat16), memory.zeros(1000, torch.float32)
    assert second.data_ptr() - first.data_ptr() == 3 * PAGE  # 2 x (PAGE + 5) bytes, to the next huge page
    assert locked == {first.data_ptr(): 2 * (PAGE + 5), second.data_ptr(): 4000}
    for one in (first, second):
        assert not one.any()
        one.fill_(1)
    assert first.dtype is torch.bfloat16 and first.shape == (PAGE + 5,) and second.shape == (1000,)


def test_what_is_made_ahead_is_there_before_anybody_asks_and_the_rest_is_given_back(locked):
    before = _resident()
    memory = HostMemory(100 * MEGABYTE)
    memory._writing.join()
    made = _resident() - before
    assert made > 90 * MEGABYTE
    taken = memory.zeros(30 * MEGABYTE, torch.uint8)
    memory.give_back()
    assert 20 * MEGABYTE < _resident() - before < 45 * MEGABYTE
    assert not taken.any()
    del taken
    gc.collect()
    assert _resident() - before < 15 * MEGABYTE and not locked


def test_memory_is_unlocked_when_the_last_view_of_a_tensor_is_gone(locked):
    memory = HostMemory(4 * PAGE)
    tensor = memory.zeros(100, torch.float32)
    view = tensor[10:20]
    del tensor
    gc.collect()
    assert len(locked) == 1
    del view
    gc.collect()
    assert not locked


def test_what_does_not_fit_is_new_and_what_was_made_ahead_is_given_back_before(locked):
    before = _resident()
    memory = HostMemory(60 * MEGABYTE)
    large = memory.zeros(80 * MEGABYTE, torch.uint8)
    assert _resident() - before < 95 * MEGABYTE
    later = HostMemory().zeros(7, torch.float32)
    assert not large.any() and not later.any() and len(locked) == 2


def test_more_than_the_system_has_is_not_made_ahead_and_what_is_asked_for_is_new(locked):
    memory = HostMemory(2**60)
    assert not memory.zeros(9, torch.float32).any()
    memory.give_back()


def test_where_memory_cannot_be_locked_the_error_names_what_helps(monkeypatch):
    class Refusing:
        @staticmethod
        def cudaHostRegister(*_: object) -> int:
            return 2

    monkeypatch.setattr(host_memory, "has_transfers", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Refusing)
    with pytest.raises(host_memory.ResourceError, match=r"CUDA error 2.*cpu_offload_fraction"):
        HostMemory().zeros(10, torch.float32)


def test_on_a_cpu_nothing_is_made_ahead_and_tensors_are_plain():
    memory = HostMemory(2**50)
    assert torch.equal(memory.zeros(3, torch.float32), torch.zeros(3))
    memory.give_back()


@pytest.mark.parametrize("elements", [1, 15, 1_000_003])
def test_threads_leave_nothing_of_a_host_tensor_out(elements):
    tensor = torch.ones(elements)
    zero_in_parallel(tensor)
    assert not tensor.any()


KINDS = [
    ((3, 5), torch.bfloat16),
    ((), torch.float32),
    ((7,), torch.uint8),
    ((0, 4), torch.float64),
    ((2, 3), torch.int64),
]


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_tensors_like_others_lie_in_one_piece_and_do_not_overlap(request, on_a_gpu):
    locked = request.getfixturevalue("locked") if on_a_gpu else {}
    there = [torch.full(shape, number + 1, dtype=dtype) for number, (shape, dtype) in enumerate(KINDS)]
    there.append(torch.arange(12.0).view(3, 4).t())  # rows that do not lie one behind the other
    copies = host_tensors_like(there)
    for copy, tensor in zip(copies, there, strict=True):
        copy.copy_(tensor)
    for copy, tensor in zip(copies, there, strict=True):
        assert copy.dtype is tensor.dtype and torch.equal(copy, tensor)
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1 and len(locked) == on_a_gpu


def test_locked_copies_are_made_once_and_again_where_others_are_wanted(locked):
    memory, tensors = HostCopies(), [torch.ones(1000), torch.ones(5, dtype=torch.bfloat16)]
    first = memory.like(tensors)
    memory.give_back()
    assert memory.like(tensors) is first and len(locked) == 1
    del first
    (other,) = memory.like(tensors[:1])
    gc.collect()
    assert list(locked) == [other.data_ptr()]


def test_copies_that_are_not_locked_are_given_back():
    memory = HostCopies()
    before = _resident()
    (copy,) = memory.like([torch.ones(100 * MEGABYTE, dtype=torch.uint8)])
    copy.fill_(1)
    del copy
    memory.give_back()
    assert _resident() - before < 50 * MEGABYTE


def test_a_host_without_room_for_copies_says_what_helps(locked, monkeypatch):
    class Full:
        cudaHostUnregister = staticmethod(locked.pop)
        cudaHostRegister = staticmethod(lambda address, size, flags: 2)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Full)
    with pytest.raises(ResourceError, match=r"copies of the actor's weights \(CUDA error 2\): take more processes"):
        host_tensors_like([torch.ones(10)])
    with pytest.raises(ResourceError, match=r"optimizer states \(CUDA error 2\): lower actor.optimizer.cpu_offload"):
        HostMemory().zeros(10, torch.float32)


def test_the_most_memory_since_the_last_look_is_told_once(monkeypatch):
    from actor import memory_peaks

    used = iter([5, 9, 7])
    monkeypatch.setattr(memory_peaks, "used_bytes", lambda: next(used))
    peaks = memory_peaks.MemoryPeaks()
    for _ in range(3):
        peaks.look()
    assert peaks.take()["memory/host_used_bytes"] == 9
    assert peaks.take() == {}
