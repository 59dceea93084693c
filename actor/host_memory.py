"""Page-locked host memory for optimizer states, made before it is needed, and for what leaves the device for a while.

The system makes a page when it is first written, and on some hosts gives no more than three gigabytes of them a second,
however many threads ask: minutes for the states of a large model. They can be made while engines load.
"""

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from actor.transfer_stream import has_transfers
from rlpipe.shared.errors import ResourceError

_HUGE_PAGES = 14  # MADV_HUGEPAGE of linux/mman.h
_ALIGNMENT_BYTES = 2**21  # a huge page: none is locked twice

_MOST_THREADS = 16
"""At most, since the other actors of a host do the same at that time."""

_THREADS_AHEAD = 2
"""While compilers and engines want the cores."""

_TENSOR_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Use:
    """What memory is for, and what helps where the host has too little of it."""

    name: str
    advice: str


STATES = Use(
    "optimizer states",
    "lower actor.optimizer.cpu_offload_fraction, set actor.optimizer.moments_dtype to bfloat16, or take more processes",
)
COPIES = Use(
    "copies of the actor's weights",
    "take more processes, or a smaller rollout.engine.memory_fraction, beside which they may stay on the device",
)


class HostMemory:
    """Where zeros for optimizer states come from: `ahead_bytes` of them are made in the background from now on. Nothing
    is where host and device are one."""

    def __init__(self, ahead_bytes: int = 0) -> None:
        self._ahead: mmap.mmap | None = None
        self._taken = 0
        if has_transfers() and ahead_bytes > 0:
            with suppress(ResourceError):  # what is asked for later may be less, and says what helps if it is not
                self._ahead = _mapped(ahead_bytes, STATES)
        if self._ahead is not None:
            written = torch.frombuffer(self._ahead, dtype=torch.uint8)
            self._writing = threading.Thread(target=zero_in_parallel, args=(written, _THREADS_AHEAD), daemon=True)
            self._writing.start()

    def zeros(self, elements: int, dtype: torch.dtype, use: Use = STATES) -> torch.Tensor:
        """A host tensor [elements] that the device can copy from and to beside its computations, in huge pages and
        locked as a whole: torch's own page-locked memory is rounded up to a power of two, and takes four times as long
        to set up.

        Raises ResourceError where the host does not have so much memory to lock.
        """
        if not has_transfers() or elements == 0:
            return torch.zeros(elements, dtype=dtype)
        size_bytes = elements * dtype.itemsize
        part = self._part_of_ahead(size_bytes)
        if part is None:
            part = _part(_mapped(size_bytes, use), 0, size_bytes)
            zero_in_parallel(torch.frombuffer(part, dtype=torch.uint8), _MOST_THREADS)
        _lock(part, size_bytes, use)
        return torch.frombuffer(part, dtype=dtype)

    def give_back(self) -> None:
        """What was made and not asked for goes back to the system; whatever is asked for next is new memory."""
        if self._ahead is None:
            return
        self._writing.join()
        if self._taken < len(self._ahead):
            self._ahead.madvise(mmap.MADV_DONTNEED, self._taken, len(self._ahead) - self._taken)
        self._ahead = None

    def _part_of_ahead(self, size_bytes: int) -> Any:
        if self._ahead is None:
            return None
        if self._taken + size_bytes > len(self._ahead):
            self.give_back()  # before as much again is made
            return None
        self._writing.join()
        part = _part(self._ahead, self._taken, size_bytes)
        self._taken += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return part


def zero_in_parallel(tensor: torch.Tensor, most_threads: int = _MOST_THREADS) -> None:
    """Fill `tensor` [n] with zeros by several threads: a thread waits for each page that the system makes."""
    threads = min(most_threads, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(torch.Tensor.zero_, tensor.chunk(threads)))


def host_tensors_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of the same shapes and dtypes, to copy from and to beside the device's computations, in one piece of memory as of
    `HostMemory.zeros`, which raises ResourceError. It lasts as long as one of them."""
    steps = [-(-one.nbytes // _TENSOR_ALIGNMENT_BYTES) * _TENSOR_ALIGNMENT_BYTES for one in tensors]
    memory = HostMemory().zeros(sum(steps), torch.uint8, COPIES)
    begins = accumulate(steps, initial=0)
    return [
        memory[begin : begin + one.nbytes].view(one.dtype).view(one.shape)
        for one, begin in zip(tensors, begins, strict=False)
    ]


class HostCopies:
    """Host memory for what leaves the device and comes back, again and again."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []

    def like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `host_tensors_like`; those of the last time where they are alike."""
        if [(one.shape, one.dtype) for one in self._tensors] != [(one.shape, one.dtype) for one in tensors]:
            self._tensors = []  # before as much again is made
            self._tensors = host_tensors_like(tensors)
        return self._tensors

    def give_back(self) -> None:
        """Until the next time. Page-locked memory stays, since to make and lock it takes seconds."""
        if not has_transfers():
            self._tensors = []


def _mapped(size_bytes: int, use: Use) -> mmap.mmap:
    whole = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    try:
        memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ResourceError(_refusal(size_bytes, str(error), use)) from error
    memory.madvise(_HUGE_PAGES)
    return memory


class _Part(ctypes.Structure):
    """What a tensor is made of; it keeps the mapping it lies in, and can be watched."""


def _part(memory: mmap.mmap, start: int, size_bytes: int) -> Any:
    """Bytes of `memory`, in an object that lives as long as a tensor made of them."""
    kind: Any = type("_Part", (_Part,), {"_fields_": [("bytes", ctypes.c_char * size_bytes)]})
    return kind.from_buffer(memory, start)


def _lock(part: Any, size_bytes: int, use: Use) -> None:
    """Until `part` is gone: CUDA would take whatever the system lays there next for locked already."""
    address = ctypes.addressof(part)
    status = torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)
    if int(status) != 0:
        raise ResourceError(_refusal(size_bytes, f"CUDA error {int(status)}", use))
    weakref.finalize(part, _unlock, address).atexit = False


def _unlock(address: int) -> None:
    if not sys.is_finalizing():
        torch.cuda.cudart().cudaHostUnregister(address)


def _refusal(size_bytes: int, reason: str, use: Use) -> str:
    return f"cannot lock {size_bytes / 2**30:.1f} GiB of host memory for {use.name} ({reason}): {use.advice}"
