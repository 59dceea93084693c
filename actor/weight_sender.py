"""Sends the policy's weights to the rollout engines, bucket by bucket, under their Hugging Face names."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from actor.hf.export import export_plan, iter_export
from actor.models.policy_model import PolicyModel
from actor.train_report import WeightSendReport
from actor.weight_transport import Broadcast, SharedBuffers, WeightTransport
from rlpipe.model.description import ModelDescription
from rlpipe.shared.errors import WeightSyncError
from rlpipe.shared.weight_channel import Listener
from rlpipe.shared.weights import BUFFERS, TensorSpec, WeightBucket, WeightGroup, checksum


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
    """Every process of the actor has one. In a broadcast global rank 0 sends to all engines; where buffers are shared
    with the engines on the same devices, each process feeds its own."""

    def __init__(self, policy: Sequence[PolicyModel], description: ModelDescription, dtype: str, bucket_bytes: int):
        self._policy = policy
        # Engines take experts stacked, whatever the checkpoint does: two tensors a layer instead of hundreds.
        self._description = replace(description, fused_experts=True)
        self.plan = plan_buckets(export_plan(self._description, dtype), bucket_bytes)
        self._listener: Listener | None = None
        self._transport: WeightTransport | None = None
        self._senders = 1

    def listen(self) -> str:
        """Address at which the engine on this process's device finds shared buffers, once `join` is called."""
        self._listener = Listener()
        return self._listener.address

    def join(self, groups: Sequence[WeightGroup], store: dist.Store, timeout_seconds: float) -> None:
        """The first processes send, as many as the groups have senders; blocks until the engines have joined.

        One group of all engines, which meet in `store`, or for each engine one in which buffers are shared.
        """
        rank, self._senders = dist.get_rank(), sum(group.senders for group in groups)
        if rank >= self._senders:
            return
        if groups[0].backend != BUFFERS:
            self._transport = Broadcast(groups[0], store, timeout_seconds)
        elif self._listener is None:
            raise WeightSyncError("no engine can share this process's buffers: call listen before joining")
        else:
            self._transport = SharedBuffers(self._listener, self.plan, timeout_seconds)

    @torch.no_grad()
    def send(self, verify: bool) -> WeightSendReport:
        """Hand every bucket of `plan` over as one flat tensor, in order. Collective over the actor's processes.

        Raises WeightSyncError where no group was joined.
        """
        start = time.perf_counter()
        if self._transport is None and dist.get_rank() < self._senders:
            raise WeightSyncError("no weight group was joined: call begin_join_weight_groups before sending weights")
        tensors = iter_export(self._policy, self._description, everywhere=self._senders > 1)
        sums = tuple(self._hand_over(self._transport, tensors, verify)) if self._transport is not None else ()
        for name, _ in tensors:
            if self._transport is not None:
                raise WeightSyncError(f"export gave {name} after the end of the weight plan")
        size = sum(bucket.size_bytes for bucket in self.plan)
        return WeightSendReport(size, time.perf_counter() - start, sums)

    def leave(self) -> None:
        if self._transport is not None:
            self._transport.leave()
            self._transport = None

    def _hand_over(
        self, transport: WeightTransport, tensors: Iterator[tuple[str, torch.Tensor | None]], verify: bool
    ) -> Iterator[str]:
        """Yields the checksum of each bucket, empty unless `verify`."""
        for bucket in self.plan:
            flat = transport.room(bucket)
            _fill(flat, bucket, tensors)
            yield checksum(flat.cpu().view(torch.uint8).numpy().data) if verify else ""
            transport.publish(flat)
        transport.finish()


def _fill(flat: torch.Tensor, bucket: WeightBucket, tensors: Iterator[tuple[str, torch.Tensor | None]]) -> None:
    start = 0
    for spec in bucket.tensors:
        name, tensor = next(tensors)
        if name != spec.name or tensor is None or tuple(tensor.shape) != spec.shape:
            found = None if tensor is None else tuple(tensor.shape)
            raise WeightSyncError(f"export gave {name} {found} where the plan has {spec.name} {spec.shape}")
        flat[start : start + spec.elements].view(spec.shape).copy_(tensor)
        start += spec.elements
