"""Copies between host and device beside what the device computes. On a CPU everything happens at once, in order."""

import mmap
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TypeAlias

import torch

from rlpipe.shared.errors import ResourceError

_HUGE_PAGES = 14  # MADV_HUGEPAGE of linux/mman.h

_ZEROING_THREADS = 16
"""At most, since the other actors of a host do the same at that time."""

Event: TypeAlias = torch.cuda.Event | None
"""A point in a stream; None on a CPU, where it has passed already."""


def has_transfers() -> bool:
    """Whether host and device have memory of their own, so that something has to be transferred."""
    return torch.cuda.is_available()


class TransferStream:
    """One direction of copies. Work given to it runs in order, and beside the compute stream."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if has_transfers() else None

    def after(self, event: Event) -> None:
        """What comes next waits for `event` of another stream."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Copies inside the block belong to this stream."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def record(self) -> Event:
        """The point behind everything given to this stream so far."""
        return None if self._stream is None else self._stream.record_event()


def record_compute() -> Event:
    """The point behind everything given to the compute stream so far."""
    return torch.cuda.current_stream().record_event() if has_transfers() else None


def compute_after(event: Event) -> None:
    """What the compute stream is given next waits for `event`."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def wait_on_host(event: Event) -> None:
    """Returns once `event` has passed."""
    if event is not None:
        event.synchronize()


class _LockedMemory(mmap.mmap):
    """Anonymous memory that CUDA has locked: unlocked before it goes, since CUDA would take whatever the system lays
    there next for locked already."""

    locked_address = 0

    def __del__(self) -> None:
        if self.locked_address and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.locked_address)


def page_locked(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A host tensor [elements] of zeros that the device can copy from and to beside its computations.

    In huge pages, written by several threads and locked as a whole: torch's own page-locked memory is rounded up to a
    power of two, and takes four times as long to set up.

    Raises ResourceError where the host does not have so much memory to lock.
    """
    if not has_transfers() or elements == 0:
        return torch.zeros(elements, dtype=dtype)
    size_bytes = elements * dtype.itemsize
    try:
        memory = _LockedMemory(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ResourceError(_refusal(size_bytes, str(error))) from error
    memory.madvise(_HUGE_PAGES)
    tensor = torch.frombuffer(memory, dtype=dtype)
    zero_in_parallel(tensor)
    status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size_bytes, 0)
    if int(status) != 0:
        raise ResourceError(_refusal(size_bytes, f"CUDA error {int(status)}"))
    memory.locked_address = tensor.data_ptr()
    return tensor


def zero_in_parallel(tensor: torch.Tensor) -> None:
    """Fill `tensor` [n] with zeros by several threads: the system makes a page when it is first written, and a thread
    waits for it."""
    threads = min(_ZEROING_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(torch.Tensor.zero_, tensor.chunk(threads)))


def _refusal(size_bytes: int, reason: str) -> str:
    return (
        f"cannot lock {size_bytes / 2**30:.1f} GiB of host memory for optimizer states ({reason}): lower "
        "actor.optimizer.cpu_offload_fraction, set actor.optimizer.moments_dtype to bfloat16, or take more processes"
    )
