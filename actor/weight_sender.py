"""Sends the policy's weights to the rollout engines, bucket by bucket, under their Hugging Face names."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist

from actor.hf.adapter_modules import table_of_adapters
from actor.hf.adapter_weights import iter_engine_factors
from actor.hf.engine_adapters import engine_factor_specs, engine_refusal
from actor.hf.export import export_plan, iter_export
from actor.models.policy_model import PolicyModel
from actor.train_report import WeightSendReport
from actor.weight_transport import Broadcast, SharedBuffers, TransferError, WeightTransport
from rlpipe.model.description import TrainableModel
from rlpipe.shared.errors import WeightSyncError
from rlpipe.shared.weight_channel import Listener
from rlpipe.shared.weights import BUFFERS, TensorSpec, WeightBucket, WeightContent, WeightGroup, checksum


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
    with the engines on the same devices, each process feeds its own.

    plans: the buckets of each content that this policy can be sent as.
    """

    def __init__(
        self,
        policy: Sequence[PolicyModel],
        description: TrainableModel,
        dtype: str,
        bucket_bytes: int,
        with_mtp: bool = False,
    ) -> None:
        """with_mtp: also the trained multi-token-prediction layer, with which engines draft."""
        self._policy = policy
        self._with_mtp = with_mtp
        # Engines take experts stacked, whatever the checkpoint does: two tensors a layer instead of hundreds.
        self._description = replace(description, fused_experts=True, fused_mtp_experts=True)
        self.plans = _plans(policy, self._description, dtype, bucket_bytes, with_mtp)
        self._listener: Listener | None = None
        self._transport: WeightTransport | None = None
        self._senders: Mapping[int, WeightGroup] = {}

    def listen(self) -> str:
        """Address at which the engine on this process's device finds shared buffers, once `join` is called."""
        if self._listener is not None:
            self._listener.close()
        self._listener = Listener()
        return self._listener.address

    def join(self, groups: Sequence[WeightGroup | None], store: dist.Store, timeout_seconds: float) -> str:
        """Leave what was joined before, and join in the processes that are to send; blocks until the engines have.

        One group of all engines, which meet in `store`, or by engine one in which buffers are shared, None for an
        engine that is not there. Returns why it did not work, empty where it did.
        """
        self.leave()
        self._senders = _senders(groups)
        rank = dist.get_rank()
        if rank not in self._senders:
            return ""
        try:
            self._transport = self._joined(self._senders[rank], store, timeout_seconds)
        except TransferError as error:
            return f"the actor's process {rank} could not join a weight group: {error}"
        return ""

    @torch.no_grad()
    def send(
        self, verify: bool, engine_failed: Callable[[], bool] = lambda: False, content: WeightContent = "merged"
    ) -> WeightSendReport:
        """Hand every bucket of `plans[content]` over as one flat tensor, in order. Collective over the actor's
        processes.

        A transfer that fails ends for this process alone, which leaves its group so that the engines in it learn of it.
        Raises WeightSyncError where no group was joined. engine_failed: asked while the engines are waited for.
        """
        start = time.perf_counter()
        if not self._senders or (self._transport is None and dist.get_rank() in self._senders):
            raise WeightSyncError("no weight group was joined: call begin_join_weight_groups before sending weights")
        plan, tensors = self.plans[content], self._tensors(content)
        sums: tuple[str, ...] = ()
        failure = ""
        if self._transport is not None:
            try:
                sums = tuple(self._hand_over(self._transport, plan, tensors, verify, engine_failed))
            except TransferError as error:
                failure = f"weights did not reach an engine: {error}"
                self.leave()
        for name, _ in tensors:  # other processes wait for this one's part
            if self._transport is not None:
                raise WeightSyncError(f"export gave {name} after the end of the weight plan")
        size = sum(bucket.size_bytes for bucket in plan)
        return WeightSendReport(size, time.perf_counter() - start, sums, failure)

    def leave(self) -> None:
        """End the connection to the engines, if there is one, in whatever state it is."""
        if self._transport is not None:
            self._transport.leave()
            self._transport = None

    def _tensors(self, content: WeightContent) -> Iterator[tuple[str, torch.Tensor | None]]:
        everywhere, lora = set(self._senders) != {0}, self._policy[0].lora
        if content == "merged" or lora is None:
            return iter_export(self._policy, self._description, everywhere=everywhere, with_mtp=self._with_mtp)
        factors = iter_engine_factors(self._policy, lora, everywhere=everywhere)
        if content == "adapters":
            return factors
        model = iter_export(
            self._policy, self._description, everywhere=everywhere, with_mtp=self._with_mtp, merge=False
        )
        return chain(model, factors)

    def _joined(self, group: WeightGroup, store: dist.Store, timeout_seconds: float) -> WeightTransport:
        if group.backend != BUFFERS:
            return Broadcast(group, store, timeout_seconds)
        if self._listener is None:
            raise WeightSyncError("no engine can share this process's buffers: call listen before joining")
        listener, self._listener = self._listener, None
        largest = max(self.plans.values(), key=len)
        return SharedBuffers(listener, largest, timeout_seconds)

    def _hand_over(
        self,
        transport: WeightTransport,
        plan: Sequence[WeightBucket],
        tensors: Iterator[tuple[str, torch.Tensor | None]],
        verify: bool,
        engine_failed: Callable[[], bool],
    ) -> Iterator[str]:
        """Yields the checksum of each bucket, empty unless `verify`."""
        for bucket in plan:
            flat = transport.room(bucket)
            _fill(flat, bucket, tensors)
            yield checksum(flat.cpu().view(torch.uint8).numpy().data) if verify else ""
            transport.publish(flat, engine_failed)
        transport.finish(engine_failed)


def _plans(
    policy: Sequence[PolicyModel], description: TrainableModel, dtype: str, bucket_bytes: int, with_mtp: bool
) -> Mapping[WeightContent, tuple[WeightBucket, ...]]:
    model = plan_buckets(export_plan(description, dtype, with_mtp=with_mtp), bucket_bytes)
    lora = policy[0].lora
    if lora is None:
        return {"merged": model}
    table = table_of_adapters(policy, lora)
    if engine_refusal(description, table):
        return {"merged": model}
    adapters = plan_buckets(engine_factor_specs(table, lora.rank, dtype), bucket_bytes)
    return {"merged": model, "model_and_adapters": (*model, *adapters), "adapters": adapters}


def _senders(groups: Sequence[WeightGroup | None]) -> Mapping[int, WeightGroup]:
    """By global rank, the group that it sends to."""
    found: dict[int, WeightGroup] = {}
    for place, group in enumerate(groups):
        if group is not None:
            found |= {place * group.senders + index: group for index in range(group.senders)}
    return found


def _fill(flat: torch.Tensor, bucket: WeightBucket, tensors: Iterator[tuple[str, torch.Tensor | None]]) -> None:
    start = 0
    for spec in bucket.tensors:
        name, tensor = next(tensors)
        if name != spec.name or tensor is None or tuple(tensor.shape) != spec.shape:
            found = None if tensor is None else tuple(tensor.shape)
            raise WeightSyncError(f"export gave {name} {found} where the plan has {spec.name} {spec.shape}")
        flat[start : start + spec.elements].view(spec.shape).copy_(tensor)
        start += spec.elements
