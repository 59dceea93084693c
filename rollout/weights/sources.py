"""The two ways in which buckets of weights come to a scheduler process, one class each."""

import io
import mmap
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, Protocol

import torch
import torch.distributed
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rlpipe.shared.weight_channel import Reader, connect
from rlpipe.shared.weights import SharedBuffer
from rollout.weights.loader import WeightLoader


class WeightSource(Protocol):
    """Where the next bucket comes from; kept among SGLang's own groups under the group's name."""

    loader: WeightLoader

    @contextmanager
    def bucket(self, elements: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The next bucket, flat, on the device; it may be overwritten after the block."""
        raise NotImplementedError

    def leave(self) -> None:
        """End the connection."""


class Broadcast:
    """A process group in which rank 0 broadcasts."""

    def __init__(self, group: torch.distributed.ProcessGroup, device: str) -> None:
        self.loader = WeightLoader()
        self._group = group
        self._device = device

    @contextmanager
    def bucket(self, elements: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        flat = torch.empty(elements, dtype=dtype, device=self._device)
        torch.distributed.broadcast(flat, src=0, group=self._group)
        yield flat

    def leave(self) -> None:
        torch.distributed.destroy_process_group(self._group)


class SharedBuffers:
    """Buffers of the actor's process on the same device, filled in rotation and read where they are.

    device, index: kind and number of this process's device.
    """

    def __init__(self, address: str, device: str, index: int = 0) -> None:
        self.loader = WeightLoader()
        self._reader: Reader = connect(address)
        self._buffers = [_opened(buffer, index) for buffer in self._reader.buffers]
        self._device = torch.get_device_module(device)
        self._next = 0

    @contextmanager
    def bucket(self, elements: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        self._reader.wait_full()
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        try:
            yield buffer[: elements * dtype.itemsize].view(dtype)
            self._device.synchronize()  # the writer does not see this process's stream
        except Exception as error:
            self._reader.fail(f"an engine could not load a weight bucket: {type(error).__name__}: {error}")
            raise
        self._reader.free()

    def leave(self) -> None:
        self._reader.close()
        self._buffers.clear()


class _OnDevice(pickle.Unpickler):
    """Reads a reference to device memory. The writer's index of the device is not this process's, which may see more
    devices."""

    def __init__(self, handle: bytes, index: int) -> None:
        super().__init__(io.BytesIO(handle))
        self._index = index

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found is not rebuild_cuda_tensor:
            return found

        def rebuild(*arguments: Any) -> torch.Tensor:
            bound = signature(rebuild_cuda_tensor).bind(*arguments)
            bound.arguments["storage_device"] = self._index
            tensor: torch.Tensor = rebuild_cuda_tensor(*bound.args, **bound.kwargs)
            return tensor

        return rebuild


def _opened(buffer: SharedBuffer, index: int) -> torch.Tensor:
    """The bytes of another process's buffer, uint8 [size_bytes]. index: of the device in this process."""
    if buffer.kind == "cuda_ipc":
        tensor: torch.Tensor = _OnDevice(buffer.handle, index).load()
        return tensor
    file = os.open(buffer.handle, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(file, buffer.size_bytes), dtype=torch.uint8)
    finally:
        os.close(file)
