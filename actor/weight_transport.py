"""The two ways in which a process of the actor hands buckets of weights to engines.

A sender asks for `room`, fills it and `publish`es it, bucket by bucket, and ends with `finish`. Two buckets are under
way at a time, so one is gathered while engines load the other.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore

from actor.device import compute_device, shareable_buffer, synchronize
from rlpipe.shared.errors import WeightSyncError
from rlpipe.shared.replaced_parts import relies_on
from rlpipe.shared.weight_channel import Listener, Writer
from rlpipe.shared.weights import JOIN_SECONDS, WeightBucket, WeightGroup

_NEW_GROUP = relies_on(
    "torch.distributed.distributed_c10d:_new_process_group_helper",
    "torch.distributed.distributed_c10d:_set_pg_timeout",
    "torch.distributed.distributed_c10d:_world",
    why="weights go to engines in a group that spans processes of different default groups",
    drop_when="torch has a public call for such a group, with a timeout that can be changed",
)
_ABORT = relies_on(
    "torch.distributed.distributed_c10d:_abort_process_group",
    why="a broken group of NCCL must not wait for an engine that is lost",
    drop_when="torch.distributed has it without an underscore",
)

IN_FLIGHT = 2
_POLL_SECONDS = 0.0005
_LOOK_SECONDS = 0.2

Result = TypeVar("Result")


class TransferError(WeightSyncError):
    """An engine could not be reached. The actor's process itself is as it was."""


class WeightTransport(Protocol):
    """One process's way to the engines that it feeds."""

    def room(self, bucket: WeightBucket) -> torch.Tensor:
        """uint8 [size_bytes] for the whole bucket, to be filled; waits until there is one."""

    def publish(self, flat: torch.Tensor, engine_failed: Callable[[], bool]) -> None:
        """Hand over the tensor that `room` gave last, and that is filled now. Raises TransferError.

        engine_failed: asked while engines are waited for, where a lost one is not noticed otherwise.
        """

    def finish(self, engine_failed: Callable[[], bool]) -> None:
        """Wait until engines have everything. Raises TransferError."""

    def leave(self) -> None:
        """End the connection, also one that is broken."""


class Broadcast:
    """Rank 0 of a process group that spans all engines: GPUs of their own, or the CPU. Each sender has one.

    sender: global rank of this process.
    """

    def __init__(self, group: WeightGroup, sender: int, store: dist.Store, timeout_seconds: float) -> None:
        try:
            self._group = _join_as_sender(group, sender, store, timeout_seconds)
        except RuntimeError as error:  # what torch.distributed raises
            raise TransferError(str(error)) from None
        self._aborts = group.backend == "nccl"
        self._broken = False
        self._in_flight: deque[tuple[Any, torch.Tensor]] = deque()

    def room(self, bucket: WeightBucket) -> torch.Tensor:
        return torch.empty(bucket.size_bytes, dtype=torch.uint8, device=compute_device())

    def publish(self, flat: torch.Tensor, engine_failed: Callable[[], bool]) -> None:
        try:
            self._in_flight.append((dist.broadcast(flat, src=0, group=self._group, async_op=True), flat))
            if len(self._in_flight) == IN_FLIGHT:
                self._wait(engine_failed)
        except RuntimeError as error:
            raise self._failure(error) from None

    def finish(self, engine_failed: Callable[[], bool]) -> None:
        try:
            while self._in_flight:
                self._wait(engine_failed)
        except RuntimeError as error:
            raise self._failure(error) from None
        synchronize()

    def leave(self) -> None:
        if self._broken and self._aborts:
            _ABORT.original()(self._group)  # to destroy it would wait for the lost engine
        else:
            dist.destroy_process_group(self._group)
        self._in_flight.clear()

    def _wait(self, engine_failed: Callable[[], bool]) -> None:
        """For the oldest bucket under way. Not every sender sees in its own group that an engine is lost: Gloo tells
        those that exchange data with it, NCCL nobody."""
        work, _ = self._in_flight.popleft()
        next_look = time.monotonic() + _LOOK_SECONDS
        while not work.is_completed():
            if time.monotonic() >= next_look:
                if engine_failed():
                    raise RuntimeError("one of them failed while it received")
                next_look = time.monotonic() + _LOOK_SECONDS
            time.sleep(_POLL_SECONDS)
        work.wait()

    def _failure(self, error: RuntimeError) -> TransferError:
        """Of what torch.distributed raises.

        No context manager handles it, here or where it is noted: from Python 3.12 on, those of contextlib keep the
        frames of what failed until garbage is collected, and with them a broken group, on which other engines wait.
        """
        self._broken = True
        return TransferError(str(error))


class SharedBuffers:
    """Buffers in the memory of this process's device, which the engine on the same device has opened once and for all.

    Nothing is sent: the engine loads straight from the buffer.
    """

    def __init__(
        self,
        listener: Listener,
        plan: Sequence[WeightBucket],
        timeout_seconds: float,
        engine_failed: Callable[[], bool] = lambda: False,
    ) -> None:
        largest = max(bucket.size_bytes for bucket in plan)
        buffers = [shareable_buffer(largest) for _ in range(min(IN_FLIGHT, len(plan)))]
        self._tensors = [tensor for tensor, _ in buffers]
        handles = [handle for _, handle in buffers]
        self._writer: Writer = _of_channel(lambda: listener.accept(handles, timeout_seconds, engine_failed))
        self._next = 0
        self._unread = 0

    def room(self, bucket: WeightBucket) -> torch.Tensor:
        if self._unread == len(self._tensors):
            self._wait()
        return self._tensors[self._next][: bucket.size_bytes]

    def publish(self, flat: torch.Tensor, engine_failed: Callable[[], bool]) -> None:
        synchronize()  # the engine's process does not see this one's stream
        _of_channel(self._writer.full)
        self._next = (self._next + 1) % len(self._tensors)
        self._unread += 1

    def finish(self, engine_failed: Callable[[], bool]) -> None:
        while self._unread:
            self._wait()

    def leave(self) -> None:
        self._writer.close()
        self._tensors.clear()

    def _wait(self) -> None:
        _of_channel(self._writer.wait_free)
        self._unread -= 1


def _of_channel(call: Callable[[], Result]) -> Result:
    """With its errors, those of the channel to an engine, as TransferError."""
    try:
        return call()
    except WeightSyncError as error:
        raise TransferError(*error.args) from None


def _join_as_sender(group: WeightGroup, sender: int, store: dist.Store, timeout_seconds: float) -> dist.ProcessGroup:
    """The same group as SGLang's `init_custom_process_group` makes, apart from the default group.

    torch has no public call for a group that spans processes of different default groups.
    """
    make, set_timeout, world = (_NEW_GROUP.original(index) for index in range(3))
    process_group: dist.ProcessGroup
    name, processes = group.name_of(sender), 1 + group.readers
    process_group, _ = make(
        processes,
        0,
        [],
        Backend(group.backend),
        PrefixStore(name, store),
        group_name=GroupName(name),
        timeout=timedelta(seconds=min(JOIN_SECONDS, timeout_seconds)),
    )
    set_timeout(timedelta(seconds=timeout_seconds), process_group)
    world.pg_group_ranks[process_group] = {index: index for index in range(processes)}
    return process_group
