"""The two ways in which buckets of weights come to a scheduler process, one class each."""

import io
import mmap
import os
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any, Protocol

import torch
import torch.distributed
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rlpipe.shared.replaced_parts import relies_on
from rlpipe.shared.weight_channel import Reader, connect
from rlpipe.shared.weights import SharedBuffer, WeightBucket
from rollout.weights.loader import WeightLoader

_ABORT = relies_on(
    "torch.distributed.distributed_c10d:_abort_process_group",
    why="a broken group of NCCL must not wait for a sender that is lost",
    drop_when="torch.distributed has it without an underscore",
)


class WeightSource(Protocol):
    """Where buckets come from; kept among SGLang's own groups under the group's name."""

    loader: WeightLoader

    def buckets(self, plan: Sequence[WeightBucket]) -> Iterator[torch.Tensor]:
        """Those of an update in order, each uint8 [size_bytes] on the device, which may be overwritten when the next is
        asked for."""
        raise NotImplementedError

    def leave(self, failure: str = "") -> None:
        """End the connection. failure: why this reader cannot go on."""


class Broadcast:
    """Process groups in which this process receives, one for each sender.

    All processes of all engines receive in the order of the plan, and as much ahead of it as `in_flight_bytes` hold:
    so several senders are busy at a time, while the present bucket is loaded, and none waits for another in a circle.

    groups: by the sender's global rank.
    """

    def __init__(self, groups: dict[int, torch.distributed.ProcessGroup], device: str, in_flight_bytes: int) -> None:
        self.loader = WeightLoader()
        self._groups = groups
        self._device = device
        self._in_flight_bytes = in_flight_bytes
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()

    def buckets(self, plan: Sequence[WeightBucket]) -> Iterator[torch.Tensor]:
        begun = 0
        for number in range(len(plan)):
            while begun < len(plan) and (begun == number or self._have_room(plan[number : begun + 1])):
                self._under_way.append(self._begin(plan[begun]))
                begun += 1
            work, flat = self._under_way.popleft()
            work.wait()
            yield flat
            del work, flat  # its memory has room for another one
        torch.get_device_module(self._device).synchronize()  # NCCL lets the host go on before anything has come

    def leave(self, failure: str = "") -> None:
        self._under_way.clear()
        for group in self._groups.values():
            if failure and torch.distributed.get_backend(group) == "nccl":
                _ABORT.original()(group)  # to destroy it would wait for senders that may be gone
            else:
                torch.distributed.destroy_process_group(group)
        self._groups.clear()

    def _have_room(self, buckets: Sequence[WeightBucket]) -> bool:
        return sum(bucket.size_bytes for bucket in buckets) <= self._in_flight_bytes

    def _begin(self, bucket: WeightBucket) -> tuple[Any, torch.Tensor]:
        flat = torch.empty(bucket.size_bytes, dtype=torch.uint8, device=self._device)
        return torch.distributed.broadcast(flat, src=0, group=self._groups[bucket.sender], async_op=True), flat


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

    def buckets(self, plan: Sequence[WeightBucket]) -> Iterator[torch.Tensor]:
        for bucket in plan:
            self._reader.wait_full()
            buffer = self._buffers[self._next]
            self._next = (self._next + 1) % len(self._buffers)
            yield buffer[: bucket.size_bytes]
            self._device.synchronize()  # the writer does not see this process's stream
            self._reader.free()

    def leave(self, failure: str = "") -> None:
        if failure:
            with suppress(OSError):  # the writer may be gone, too
                self._reader.fail(f"an engine could not load a weight bucket: {failure}")
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
