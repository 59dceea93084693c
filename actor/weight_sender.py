"""Sends the policy's weights to the rollout engines, bucket by bucket, under their Hugging Face names."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from actor.hf.adapter_modules import table_of_adapters
from actor.hf.adapter_table import AdaptedWeight
from actor.hf.adapter_weights import engine_factor_tensors
from actor.hf.engine_adapters import engine_refusal
from actor.hf.export import Gatherer, exported_entries
from actor.hf.weight_table import Entry
from actor.models.policy_model import PolicyModel
from actor.train_report import WeightSendReport
from actor.weight_plan import Holders, Portion, Source, adapter_sources, buckets_of, model_sources, portions_of
from actor.weight_transport import Broadcast, SharedBuffers, TransferError, WeightTransport
from rlpipe.config.layout import ActorLayout
from rlpipe.model.description import TrainableModel
from rlpipe.shared.block_fp8 import quantize_into
from rlpipe.shared.errors import WeightSyncError
from rlpipe.shared.weight_channel import Listener
from rlpipe.shared.weights import (
    BUFFERS,
    StackedExperts,
    TensorSpec,
    WeightBucket,
    WeightContent,
    WeightGroup,
    checksum,
)


class WeightSender:
    """Every process of the actor has one. In a broadcast each process of one copy of the weights sends what it holds to
    all engines (actor/weight_plan.py); where buffers are shared with the engines on the same devices, each process
    feeds its own with everything.

    plans: the buckets of each content that this policy can be sent as, the same on all processes.
    """

    def __init__(
        self,
        policy: Sequence[PolicyModel],
        description: TrainableModel,
        dtype: str,
        bucket_bytes: int,
        layout: ActorLayout | None,
        with_mtp: bool = False,
        quantization: str = "none",
    ) -> None:
        """layout: None where engines share the devices of the actor. with_mtp: also the trained multi-token-prediction
        layer, with which engines draft. quantization: of the engines; what they keep in 8 bits is sent so."""
        self._policy = policy
        # Engines take experts stacked, whatever the checkpoint does: two tensors a layer instead of hundreds.
        stacked = replace(description, fused_experts=True, fused_mtp_experts=True)
        self._holders = None if layout is None else Holders(layout, description.layers)
        self._portions = {
            content: tuple(portions_of(sources, self._holders, bucket_bytes) for sources in parts)
            for content, parts in _contents(policy, stacked, dtype, with_mtp, quantization).items()
        }
        self.plans: Mapping[WeightContent, tuple[WeightBucket, ...]] = {
            content: tuple(chain(*(buckets_of(part, self._holders, bucket_bytes) for part in parts)))
            for content, parts in self._portions.items()
        }
        self._listener: Listener | None = None
        self._transport: WeightTransport | None = None
        self._senders: Mapping[int, WeightGroup] = {}

    def listen(self) -> str:
        """Address at which the engine on this process's device finds shared buffers, once `join` is called."""
        if self._listener is not None:
            self._listener.close()
        self._listener = Listener()
        return self._listener.address

    def join(
        self,
        groups: Sequence[WeightGroup],
        store: dist.Store,
        timeout_seconds: float,
        engine_failed: Callable[[], bool] = lambda: False,
    ) -> str:
        """Leave what was joined before, and join in the processes that are to send; blocks until the engines have, or
        one `engine_failed`, which is asked meanwhile where buffers are shared. In a group that communicates, engines
        are waited for no longer than JOIN_SECONDS.

        One group of all engines, which meet in `store`, or for each engine one in which buffers are shared. Returns why
        it did not work, empty where it did.
        """
        self.leave()
        self._senders = {sender: group for group in groups for sender in group.senders}
        rank = dist.get_rank()
        if rank not in self._senders:
            return ""
        try:
            self._transport = self._joined(self._senders[rank], store, timeout_seconds, engine_failed)
        except TransferError as error:
            return f"the actor's process {rank} could not join a weight group: {error}"
        return ""

    @torch.no_grad()
    def send(
        self, verify: bool, engine_failed: Callable[[], bool] = lambda: False, content: WeightContent = "merged"
    ) -> WeightSendReport:
        """Hand this process's buckets of `plans[content]` over, each as one flat tensor, in order. Collective over the
        actor's processes.

        A transfer that fails ends for this process alone, which leaves its group so that the engines in it learn of it.
        Raises WeightSyncError where no group was joined. engine_failed: asked while the engines are waited for.
        """
        start = time.perf_counter()
        rank = dist.get_rank()
        if not self._senders or (self._transport is None and rank in self._senders):
            raise WeightSyncError("no weight group was joined: call begin_join_weight_groups before sending weights")
        streams = self._streams(content)
        hand_over = _HandOver(self._transport, verify, engine_failed)
        for bucket in self.plans[content]:
            exported = sum(not spec.is_scale for spec in bucket.tensors)
            tensors = islice(streams.get(bucket.sender, iter(())), exported)
            hand_over.bucket(bucket, tensors, is_own=self._holders is None or bucket.sender == rank)
        for name, _ in chain(*streams.values()):
            raise WeightSyncError(f"export gave {name} after the end of the weight plan")
        hand_over.finish()
        if hand_over.failure:
            self.leave()  # only now: other processes needed this one's part of gathers
        seconds = time.perf_counter() - start
        return WeightSendReport(hand_over.sent_bytes, seconds, tuple(hand_over.checksums), hand_over.failure)

    def leave(self) -> None:
        """End the connection to the engines, if there is one, in whatever state it is."""
        if self._transport is not None:
            self._transport.leave()
            self._transport = None

    def _streams(self, content: WeightContent) -> Mapping[int, Iterator[tuple[str, torch.Tensor | None]]]:
        """By sender, the tensors of its buckets: of this process, and of those whose gathers it takes part in."""
        gather = Gatherer(self._policy, merge=content == "merged")
        group = parallel_state.get_tensor_model_parallel_group()
        senders = {0} if self._holders is None else set(dist.get_process_group_ranks(group))
        portions = [portion for part in self._portions[content] for portion in part]
        own = {sender: [one for one in portions if one.sender == sender] for sender in senders}
        return {sender: self._stream(gather, its) for sender, its in own.items()}

    def _stream(self, gather: Gatherer, portions: Sequence[Portion]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Name and value of each exported tensor, None where this process only takes part in a gather."""
        for portion in portions:
            names = (spec.name for spec in portion.tensors if not spec.is_scale)
            yield from zip(names, self._values(gather, portion), strict=True)

    def _values(self, gather: Gatherer, portion: Portion) -> Iterable[torch.Tensor | None]:
        def gathered(entry: Entry) -> Sequence[torch.Tensor | None]:
            return gather.everywhere(entry) if self._holders is None else gather.at_holder(entry, portion.sender)

        source = portion.source
        if isinstance(source, AdaptedWeight):
            lora = self._policy[0].lora
            assert lora is not None
            return engine_factor_tensors(source, lora, gathered)
        if self._holders is None or source.split != "expert":
            return gathered(source)
        exported = [spec for spec in portion.tensors if not spec.is_scale]
        if portion.sender != dist.get_rank():
            return [None] * len(exported)
        return _experts(gather, source, exported)

    def _joined(
        self, group: WeightGroup, store: dist.Store, timeout_seconds: float, engine_failed: Callable[[], bool]
    ) -> WeightTransport:
        if group.backend != BUFFERS:
            return Broadcast(group, dist.get_rank(), store, timeout_seconds)
        if self._listener is None:
            raise WeightSyncError("no engine can share this process's buffers: call listen before joining")
        listener, self._listener = self._listener, None
        largest = max(self.plans.values(), key=len)
        return SharedBuffers(listener, largest, timeout_seconds, engine_failed)


class _HandOver:
    """One process's part in an update. After a transfer has failed it still gathers what other processes send.

    checksums: of all buckets of the plan, empty for those that are not its own, and for all unless `verify`.
    """

    def __init__(self, transport: WeightTransport | None, verify: bool, engine_failed: Callable[[], bool]) -> None:
        self._transport = transport
        self._verify = verify
        self._engine_failed = engine_failed
        self.sent_bytes = 0
        self.checksums: list[str] = []
        self.failure = ""

    def bucket(self, bucket: WeightBucket, tensors: Iterator[tuple[str, torch.Tensor | None]], is_own: bool) -> None:
        """tensors: those that the bucket is made of, with values if it `is_own`."""
        found = ""
        if is_own and self._transport is not None and not self.failure:
            try:
                flat = self._transport.room(bucket)
                _fill(flat, bucket, tensors)
                found = checksum(flat.cpu().numpy().data) if self._verify else ""
                self._transport.publish(flat, self._engine_failed)
                self.sent_bytes += bucket.size_bytes
            except TransferError as error:
                self._note(error)
        self.checksums.append(found)
        for _ in tensors:  # other processes wait for this one's part
            pass

    def finish(self) -> None:
        """Wait until engines have everything."""
        if self._transport is not None and not self.failure:
            try:
                self._transport.finish(self._engine_failed)
            except TransferError as error:
                self._note(error)

    def _note(self, error: TransferError) -> None:
        self.failure = f"weights did not reach an engine: {error}"


def _experts(gather: Gatherer, entry: Entry, tensors: Sequence[TensorSpec]) -> Iterator[torch.Tensor]:
    """Those of this process that each of `tensors` names."""
    first, held = gather.held_experts(entry)
    for spec in tensors:
        stacked = StackedExperts.of_name(spec.name)
        assert stacked is not None
        yield held[stacked.first - first :][: spec.shape[0]]


def _contents(
    policy: Sequence[PolicyModel], description: TrainableModel, dtype: str, with_mtp: bool, quantization: str
) -> Mapping[WeightContent, Sequence[Sequence[tuple[Source, Sequence[TensorSpec]]]]]:
    """What each content consists of: parts that are sent one after another."""
    model = model_sources(exported_entries(policy, description, with_mtp=with_mtp), dtype, quantization)
    lora = policy[0].lora
    if lora is None:
        return {"merged": [model]}
    table = table_of_adapters(policy, lora)
    if engine_refusal(description, table):
        return {"merged": [model]}
    adapters = adapter_sources(table, lora.rank, dtype)
    return {"merged": [model], "model_and_adapters": [model, adapters], "adapters": [adapters]}


def _fill(flat: torch.Tensor, bucket: WeightBucket, tensors: Iterator[tuple[str, torch.Tensor | None]]) -> None:
    """flat: uint8 [size_bytes]."""
    if bucket.has_gaps:
        flat.zero_()  # checksums are of all bytes, and processes that fill the same bucket have to agree
    pieces = zip(bucket.tensors, bucket.pieces(flat), strict=True)
    for spec, piece in pieces:
        name, tensor = next(tensors)
        if name != spec.name or tensor is None or tuple(tensor.shape) != spec.shape:
            found = None if tensor is None else tuple(tensor.shape)
            raise WeightSyncError(f"export gave {name} {found} where the plan has {spec.name} {spec.shape}")
        if piece.dtype == torch.float8_e4m3fn:
            _, scales = next(pieces)
            quantize_into(piece, scales, tensor)
        else:
            piece.copy_(tensor)
