"""Sends the policy's weights to the rollout engines, bucket by bucket, under their Hugging Face names."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

from actor.device import synchronize
from actor.hf.export import export_plan, iter_export
from actor.models.description import ModelDescription
from actor.models.policy import PolicyModel
from actor.report import WeightSendReport
from rlpipe.errors import WeightSyncError
from rlpipe.weights import TensorSpec, WeightBucket, WeightGroup, checksum

_IN_FLIGHT = 2


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> tuple[WeightBucket, ...]:
    """Consecutive tensors of one dtype, together at most `bucket_bytes`; a larger tensor gets a bucket of its own."""
    buckets: list[WeightBucket] = []
    open_specs: list[TensorSpec] = []
    open_bytes = 0
    for spec in specs:
        size = spec.elements * getattr(torch, spec.dtype).itemsize
        if open_specs and (open_bytes + size > bucket_bytes or spec.dtype != open_specs[0].dtype):
            buckets.append(WeightBucket(tuple(open_specs), open_bytes))
            open_specs, open_bytes = [], 0
        open_specs.append(spec)
        open_bytes += size
    if open_specs:
        buckets.append(WeightBucket(tuple(open_specs), open_bytes))
    return tuple(buckets)


class WeightSender:
    """Every process of the actor has one; only global rank 0 joins the engines' group and broadcasts."""

    def __init__(self, policy: Sequence[PolicyModel], description: ModelDescription, dtype: str, bucket_bytes: int):
        self._policy = policy
        self._description = description
        self.plan = plan_buckets(export_plan(description, dtype), bucket_bytes)
        self._group: dist.ProcessGroup | None = None

    def join(self, group: WeightGroup, timeout_seconds: float) -> None:
        """Global rank 0 becomes rank 0 of the engines' group; blocks until all engines have joined. Others: no-op."""
        if dist.get_rank() == 0:
            self._group = _join_as_sender(group, timeout_seconds)

    def send(self, verify: bool) -> WeightSendReport:
        """Broadcast every bucket of `plan` as one flat tensor, in order. Collective over the actor's processes.

        Raises WeightSyncError where no group was joined.
        """
        start = time.perf_counter()
        is_sender = dist.get_rank() == 0
        if is_sender and self._group is None:
            raise WeightSyncError("no weight group was joined: call begin_join_weight_group before sending weights")
        sums: list[str] = []
        in_flight: deque[tuple[Any, torch.Tensor]] = deque()
        for flat in self._flat_buckets():
            sums.append(checksum(flat.cpu().view(torch.uint8).numpy().data) if verify else "")
            in_flight.append((dist.broadcast(flat, src=0, group=self._group, async_op=True), flat))
            if len(in_flight) == _IN_FLIGHT:
                in_flight.popleft()[0].wait()
        while in_flight:
            in_flight.popleft()[0].wait()
        synchronize()
        size = sum(bucket.size_bytes for bucket in self.plan)
        return WeightSendReport(size, time.perf_counter() - start, tuple(sums))

    def leave(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    @torch.no_grad()
    def _flat_buckets(self) -> Iterator[torch.Tensor]:
        """The buckets on global rank 0; nothing elsewhere, though every process takes part in the export."""
        tensors = iter_export(self._policy, self._description)
        if dist.get_rank() != 0:
            for _ in tensors:
                pass
            return
        for bucket in self.plan:
            parts = []
            for spec in bucket.tensors:
                name, tensor = next(tensors)
                if name != spec.name or tensor is None or tuple(tensor.shape) != spec.shape:
                    found = None if tensor is None else tuple(tensor.shape)
                    raise WeightSyncError(f"export gave {name} {found} where the plan has {spec.name} {spec.shape}")
                parts.append(tensor.reshape(-1).to(getattr(torch, spec.dtype)))
            yield torch.cat(parts)
        for name, _ in tensors:
            raise WeightSyncError(f"export gave {name} after the end of the weight plan")


def _join_as_sender(group: WeightGroup, timeout_seconds: float) -> dist.ProcessGroup:
    """The same group as SGLang's `init_custom_process_group` makes: apart from the default group, with rank 0 as store.

    torch has no public call for a group that spans processes of different default groups.
    """
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, size = next(rendezvous(f"tcp://{group.address}:{group.port}", 0, group.world_size, timeout=timeout))
    store.set_timeout(timeout)
    process_group, _ = _new_process_group_helper(
        size,
        rank,
        [],
        Backend(group.backend),
        PrefixStore(group.name, store),
        group_name=GroupName(group.name),
        timeout=timeout,
    )
    _world.pg_group_ranks[process_group] = {index: index for index in range(size)}
    return process_group
