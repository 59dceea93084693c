"""The two ways in which a process of the actor hands buckets of weights to engines.

A sender asks for `room`, fills it and `publish`es it, bucket by bucket, and ends with `finish`. Two buckets are under
way at a time, so one is gathered while engines load the other.
"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    _new_process_group_helper,
    _world,
)

from actor.device import compute_device, shareable_buffer, synchronize
from rlpipe.shared.weight_channel import Listener, Writer
from rlpipe.shared.weights import WeightBucket, WeightGroup

IN_FLIGHT = 2


class WeightTransport(Protocol):
    """One process's way to the engines that it feeds."""

    def room(self, bucket: WeightBucket) -> torch.Tensor:
        """A flat tensor for the whole bucket, to be filled; waits until there is one."""

    def publish(self, flat: torch.Tensor) -> None:
        """Hand over the tensor that `room` gave last, and that is filled now."""

    def finish(self) -> None:
        """Wait until engines have everything."""

    def leave(self) -> None:
        """End the connection."""


class Broadcast:
    """Rank 0 of a process group that spans all engines: GPUs of their own, or the CPU."""

    def __init__(self, group: WeightGroup, store: dist.Store, timeout_seconds: float) -> None:
        self._group = _join_as_sender(group, store, timeout_seconds)
        self._in_flight: deque[tuple[Any, torch.Tensor]] = deque()

    def room(self, bucket: WeightBucket) -> torch.Tensor:
        dtype = bucket_dtype(bucket)
        return torch.empty(bucket.size_bytes // dtype.itemsize, dtype=dtype, device=compute_device())

    def publish(self, flat: torch.Tensor) -> None:
        self._in_flight.append((dist.broadcast(flat, src=0, group=self._group, async_op=True), flat))
        if len(self._in_flight) == IN_FLIGHT:
            self._in_flight.popleft()[0].wait()

    def finish(self) -> None:
        while self._in_flight:
            self._in_flight.popleft()[0].wait()
        synchronize()

    def leave(self) -> None:
        dist.destroy_process_group(self._group)


class SharedBuffers:
    """Buffers in the memory of this process's device, which the engine on the same device has opened once and for all.

    Nothing is sent: the engine loads straight from the buffer.
    """

    def __init__(self, listener: Listener, plan: Sequence[WeightBucket], timeout_seconds: float) -> None:
        largest = max(bucket.size_bytes for bucket in plan)
        buffers = [shareable_buffer(largest) for _ in range(min(IN_FLIGHT, len(plan)))]
        self._tensors = [tensor for tensor, _ in buffers]
        self._writer: Writer = listener.accept([handle for _, handle in buffers], timeout_seconds)
        self._next = 0
        self._unread = 0

    def room(self, bucket: WeightBucket) -> torch.Tensor:
        if self._unread == len(self._tensors):
            self._wait()
        return self._tensors[self._next][: bucket.size_bytes].view(bucket_dtype(bucket))

    def publish(self, flat: torch.Tensor) -> None:
        synchronize()  # the engine's process does not see this one's stream
        self._writer.full()
        self._next = (self._next + 1) % len(self._tensors)
        self._unread += 1

    def finish(self) -> None:
        while self._unread:
            self._wait()

    def leave(self) -> None:
        self._writer.close()

    def _wait(self) -> None:
        self._writer.wait_free()
        self._unread -= 1


def bucket_dtype(bucket: WeightBucket) -> torch.dtype:
    """Of all its tensors."""
    dtype: torch.dtype = getattr(torch, bucket.tensors[0].dtype)
    return dtype


def _join_as_sender(group: WeightGroup, store: dist.Store, timeout_seconds: float) -> dist.ProcessGroup:
    """The same group as SGLang's `init_custom_process_group` makes, apart from the default group.

    torch has no public call for a group that spans processes of different default groups.
    """
    process_group, _ = _new_process_group_helper(
        group.world_size,
        0,
        [],
        Backend(group.backend),
        PrefixStore(group.name, store),
        group_name=GroupName(group.name),
        timeout=timedelta(seconds=timeout_seconds),
    )
    _world.pg_group_ranks[process_group] = {index: index for index in range(group.world_size)}
    return process_group
