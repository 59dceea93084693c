"""Page-locked host memory for optimizer states, made before it is needed.

The system makes a page when it is first written, and on some hosts gives no more than three gigabytes of them a second,
however many threads ask: minutes for the states of a large model. They can be made while engines load.
"""

import ctypes
import mmap
import os
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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


class HostMemory:
    """Where zeros for optimizer states come from: `ahead_bytes` of them are made in the background from now on. Nothing
    is where host and device are one."""

    def __init__(self, ahead_bytes: int = 0) -> None:
        self._ahead: mmap.mmap | None = None
        self._taken = 0
        if has_transfers() and ahead_bytes > 0:
            with suppress(ResourceError):  # what is asked for later may be less, and says what helps if it is not
                self._ahead = _mapped(ahead_bytes)
        if self._ahead is not None:
            written = torch.frombuffer(self._ahead, dtype=torch.uint8)
            self._writing = threading.Thread(target=zero_in_parallel, args=(written, _THREADS_AHEAD), daemon=True)
            self._writing.start()

    def zeros(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
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
            part = _part(_mapped(size_bytes), 0, size_bytes)
            zero_in_parallel(torch.frombuffer(part, dtype=torch.uint8), _MOST_THREADS)
        _lock(part, size_bytes)
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


def _mapped(size_bytes: int) -> mmap.mmap:
    whole = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    try:
        memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ResourceError(_refusal(size_bytes, str(error))) from error
    memory.madvise(_HUGE_PAGES)
    return memory


class _Part(ctypes.Structure):
    """What a tensor is made of; it keeps the mapping it lies in, and can be watched."""


def _part(memory: mmap.mmap, start: int, size_bytes: int) -> Any:
    """Bytes of `memory`, in an object that lives as long as a tensor made of them."""
    kind: Any = type("_Part", (_Part,), {"_fields_": [("bytes", ctypes.c_char * size_bytes)]})
    return kind.from_buffer(memory, start)


def _lock(part: Any, size_bytes: int) -> None:
    """Until `part` is gone: CUDA would take whatever the system lays there next for locked already."""
    address = ctypes.addressof(part)
    status = torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)
    if int(status) != 0:
        raise ResourceError(_refusal(size_bytes, f"CUDA error {int(status)}"))
    weakref.finalize(part, _unlock, address).atexit = False


def _unlock(address: int) -> None:
    if not sys.is_finalizing():
        torch.cuda.cudart().cudaHostUnregister(address)


def _refusal(size_bytes: int, reason: str) -> str:
    return (
        f"cannot lock {size_bytes / 2**30:.1f} GiB of host memory for optimizer states ({reason}): lower "
        "actor.optimizer.cpu_offload_fraction, set actor.optimizer.moments_dtype to bfloat16, or take more processes"
    )
