"""The only place of the training half that knows which device there is."""

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from multiprocessing.reduction import ForkingPickler
from typing import TypeAlias

import torch

from rlpipe.shared.replaced_parts import relies_on
from rlpipe.shared.weights import SharedBuffer

_ALLOCATOR_SETTINGS = relies_on(
    "torch.cuda.memory:_set_allocator_settings",
    why="a buffer that CUDA shares must not lie in expandable segments, which can be chosen at run time only so",
    drop_when="torch takes allocator settings for a block, or shares expandable segments by its plain handles",
)

Mark: TypeAlias = float | torch.Event
"""A moment: of the host's monotonic clock in seconds, or an event in the device's present stream."""


@cache
def _has_cuda() -> bool:
    """torch asks the driver each time, which is too slow for what happens thousands of times in a step."""
    return torch.cuda.is_available()


def compute_device() -> torch.device:
    """The GPU of this process, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def collective_backend() -> str:
    """The torch.distributed backend of the device."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def synchronize() -> None:
    """Wait until the device has finished what was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def synchronize_compute() -> None:
    """Wait until the compute stream has finished what it was given; transfers beside it may go on."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def has_own_memory() -> bool:
    """Whether the device has memory of its own, apart from the host's."""
    return torch.cuda.is_available()


def allocated_memory_bytes() -> int:
    """What tensors of this process take of its device; 0 on a CPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


@contextmanager
def peak_allocation() -> Iterator[Callable[[], int]]:
    """Yields a function that tells the most bytes that were allocated in the block beyond those before it."""
    if not torch.cuda.is_available():
        yield lambda: 0
        return
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    yield lambda: torch.cuda.max_memory_allocated() - before


def release_cached_memory() -> None:
    """Give the device memory that torch keeps for later back to the device, for other processes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_memory_bytes() -> int:
    """Of this process's device, which other processes may use, too; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def reserved_memory_bytes() -> int:
    """What torch holds of the device for this process; 0 on a CPU."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def import_compilers() -> None:
    """Import what compiles kernels on this device, which takes seconds."""
    if torch.cuda.is_available():
        import_module("torch._inductor.compile_fx")


def mark() -> Mark:
    """This moment, on a GPU the one at which its stream gets here."""
    if not _has_cuda():
        return time.perf_counter()
    # Recording a torch.cuda.Event looks up its stream in Python, which takes four times as long.
    event = torch.Event(device="cuda", enable_timing=True)
    event.record()
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Between two marks that the device has passed."""
    if isinstance(start, float) or isinstance(end, float):
        return float(end) - float(start)  # type: ignore[arg-type]
    return start.elapsed_time(end) / 1000


def device_name() -> str:
    """What torch calls the device; empty for a CPU, which has no peak to compare with."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def host_buffer_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised host tensor of the same shape and dtype; page-locked where that speeds up transfers."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=_has_cuda())


def pageable_copy(tensor: torch.Tensor) -> torch.Tensor:
    """In host memory that goes back to the system when it is freed, as page-locked memory does not. Its pages are
    written by all threads first: one alone, in the copy, takes several times as long."""
    return torch.empty_like(tensor, device="cpu").zero_().copy_(tensor)


def shareable_buffer(size_bytes: int) -> tuple[torch.Tensor, SharedBuffer]:
    """An uninitialised uint8 [size_bytes] tensor on the device, and how another process of this machine opens it."""
    if torch.cuda.is_available():
        buffer = _cuda_buffer(size_bytes)
        return buffer, SharedBuffer("cuda_ipc", bytes(ForkingPickler.dumps(buffer)), size_bytes)
    # A file in memory that has no name: it is gone with the last process that has it open.
    file = os.memfd_create("rlpipe-weights")
    os.ftruncate(file, size_bytes)
    memory = torch.frombuffer(mmap.mmap(file, size_bytes), dtype=torch.uint8)
    return memory, SharedBuffer("memory_file", f"/proc/{os.getpid()}/fd/{file}".encode(), size_bytes)


def _cuda_buffer(size_bytes: int) -> torch.Tensor:
    """In memory of its own that CUDA can share: expandable segments consist of pieces, which its plain handles do not
    cover."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    plain = settings.replace("expandable_segments:True", "expandable_segments:False")
    if plain != settings:
        _ALLOCATOR_SETTINGS.original()(plain)
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device=compute_device())
    finally:
        if plain != settings:
            _ALLOCATOR_SETTINGS.original()(settings)
