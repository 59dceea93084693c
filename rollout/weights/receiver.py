"""Receiving weights in a scheduler process, bucket by bucket within one request.

Replaces SGLang's own functions: its broadcast makes every tensor and then a second copy of them all just to know the
bucket's size, it cannot tell what arrived, and it has no way to read buffers that stay open.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch.distributed.distributed_c10d import default_pg_timeout

from rlpipe.shared.replaced_parts import relies_on, replaces
from rlpipe.shared.weights import BUFFERS, JOIN_SECONDS, WeightBucket, WeightGroup, checksum
from rollout.weights.adapter_loader import load_adapter
from rollout.weights.drafting_model import with_drafting_model
from rollout.weights.loader import WeightLoader
from rollout.weights.sources import Broadcast, SharedBuffers, WeightSource
from rollout.weights.update_messages import Answer, RankAnswer, group_of, plan_of

replaces(
    "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater.init_weights_update_group",
    "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater.destroy_weights_update_group",
    "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater._update_bucketed_weights_from_distributed",
    "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater._model_update_group",
    why="SGLang's broadcast makes every tensor twice, cannot tell what arrived, and cannot read buffers that stay open",
    drop_when="SGLang receives flat buckets in place and answers with their checksums",
)
replaces(
    "sglang.srt.managers.scheduler_components.flush_wrapper:SchedulerFlushWrapper.__init__",
    why="to flush the cache before an update would empty the allocator each time",
    drop_when="the request to flush says whether the allocator is emptied",
)
_SET_TIMEOUT = relies_on(
    "torch.distributed.distributed_c10d:_set_pg_timeout",
    why="processes wait a shorter time to meet than for weights",
    drop_when="torch changes a group's timeout by a public call",
)

VERIFY_VARIABLE = "RLPIPE_VERIFY_WEIGHTS"


def install() -> None:
    """Call once, before the scheduler starts."""
    from sglang.srt.managers.scheduler_components.flush_wrapper import SchedulerFlushWrapper
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    WeightUpdater.init_weights_update_group = join_group
    WeightUpdater.destroy_weights_update_group = leave_group
    WeightUpdater._update_bucketed_weights_from_distributed = receive_buckets
    SchedulerFlushWrapper.__init__ = _keeping_the_allocator(SchedulerFlushWrapper.__init__)


def _keeping_the_allocator(make: Callable[..., None]) -> Callable[..., None]:
    """Requests to empty the cache come before every update; to empty the allocator then too, as SGLang does, costs a
    garbage collection on a CPU and on a GPU memory that is taken again at once. Going to sleep still empties it."""

    def make_wrapper(wrapper: Any, *, flush_cache: Callable[..., bool], **others: Any) -> None:
        make(wrapper, flush_cache=partial(flush_cache, empty_cache=False), **others)

    return make_wrapper


def join_group(
    updater: Any,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str = "nccl",
) -> tuple[bool, str]:
    """Whether it joined, and why not. A group of shared buffers has a listener for each tensor-parallel rank."""
    source: WeightSource
    try:
        group = group_of(master_address)
        if group.backend == BUFFERS:
            source = SharedBuffers(group.address_of(updater.tp_rank), updater.device, updater.gpu_id)
        else:
            source = _broadcast(group, rank_offset + updater.tp_rank, updater.device)
    except Exception as error:  # the answer must reach the engine whatever happened, or it waits for ever
        answer = RankAnswer(failure=f"{type(error).__name__}: {error}")
    else:
        updater._model_update_group[group_name] = source
        answer = RankAnswer()
    failure = Answer(tuple(_of_all_ranks(answer))).failure
    return not failure, failure


def leave_group(updater: Any, group_name: str) -> tuple[bool, str]:
    """Ends the connection of a group."""
    source: WeightSource | None = updater._model_update_group.pop(group_name, None)
    if source is None:
        return False, f"there is no group {group_name!r}"
    source.leave()
    return True, ""


def receive_buckets(
    updater: Any, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str
) -> tuple[bool, str]:
    """Receives the tensors of each bucket of `plan_fields` in one piece, and loads them.

    Returns whether it worked on all ranks, and the text of an `Answer` with the checksums of the received buckets where
    verification is on. They are of what arrived, before it is put into SGLang's fused and sharded parameters.
    """
    answer = Answer(tuple(_of_all_ranks(_received(updater, plan_of(names, dtypes, shapes), group_name))))
    return not answer.failure, answer.as_text()


def _received(updater: Any, plan: Sequence[WeightBucket], group_name: str) -> RankAnswer:
    """A rank that fails leaves the group, so that senders and other ranks do not wait for it."""
    source: WeightSource = updater._model_update_group[group_name]
    update, failure = _Update(updater, source.loader), ""
    try:
        arriving = source.buckets(plan)
        for bucket in plan:
            update.take(bucket, next(arriving))
        next(arriving, None)  # the source may have the last one again
        update.finish()
    except Exception as error:  # the answer must reach the engine whatever happened, or it waits for ever
        failure = f"{type(error).__name__}: {error}"
    if failure:
        source.leave(failure)
        del updater._model_update_group[group_name]
        return RankAnswer(failure=f"{update.place(plan)}: {failure}")
    return RankAnswer(tuple(update.checksums))


class _Update:
    """One update of a scheduler's model, bucket by bucket. checksums: of what came, where they are asked for."""

    def __init__(self, updater: Any, loader: WeightLoader) -> None:
        self._updater = updater
        self._loader = loader
        self._model = with_drafting_model(updater.get_model())
        self._verify = os.environ.get(VERIFY_VARIABLE) == "1"
        self._factors: dict[str, torch.Tensor] = {}
        self._taken = 0
        self.checksums: list[str] = []

    def take(self, bucket: WeightBucket, flat: torch.Tensor) -> None:
        """flat: uint8 [size_bytes]."""
        tensors = [(spec.name, piece) for spec, piece in zip(bucket.tensors, bucket.pieces(flat), strict=True)]
        if bucket.holds_adapters:
            self._factors |= {name: tensor.to("cpu", copy=True) for name, tensor in tensors}
        else:
            self._loader.load(self._model, tensors)
        if self._verify:
            self.checksums.append(checksum(flat.cpu().numpy().data))
        self._taken += 1

    def finish(self) -> None:
        """Call after the last bucket."""
        self._loader.finish(self._model)
        if self._factors:
            load_adapter(self._updater.get_model_runner().lora_manager, self._factors)

    def place(self, plan: Sequence[WeightBucket]) -> str:
        """Where in the update it is."""
        if self._taken == len(plan):
            return "adapters" if self._factors else "small tensors"
        return f"bucket {self._taken}, which starts with {plan[self._taken].tensors[0].name!r}"


def _broadcast(group: WeightGroup, reader: int, device: str) -> Broadcast:
    """Joined with all senders; or with none, where one of them does not come."""
    groups: dict[int, torch.distributed.ProcessGroup] = {}
    source = Broadcast(groups, device, group.in_flight_bytes)
    try:
        for sender in group.senders:
            groups[sender] = _joined(group, sender, reader)
    except Exception as error:
        source.leave(str(error))
        raise
    return source


def _joined(group: WeightGroup, sender: int, reader: int) -> torch.distributed.ProcessGroup:
    """The process group of one sender. Waits for the other processes no longer than `JOIN_SECONDS`: one of them may
    have died meanwhile."""
    from sglang.srt.utils.common import init_custom_process_group
    from sglang.srt.utils.network import NetworkAddress

    process_group = init_custom_process_group(
        backend=group.backend,
        init_method=NetworkAddress(group.address_of(0), group.port).to_tcp(),
        timeout=timedelta(seconds=JOIN_SECONDS),
        world_size=1 + group.readers,
        rank=1 + reader,
        group_name=group.name_of(sender),
    )
    _SET_TIMEOUT.original()(default_pg_timeout, process_group)
    return process_group


def _of_all_ranks(answer: RankAnswer) -> list[RankAnswer]:
    """The answers of all tensor-parallel ranks, on each. SGLang answers with what rank 0 returns, whatever happened on
    the others."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    answers = [answer] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(answers, answer, group=group.cpu_group)
    return answers
