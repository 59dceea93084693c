"""The actor's processes that send weights, and processes that receive them as an engine's do; imports Megatron."""

import gc
import multiprocessing
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from buffer_reader import invite
from model_support import read_tensors
from torch.distributed.distributed_c10d import _new_process_group_helper, _world
from train_workers import trainer

from actor.collectives.interception import listen
from actor.collectives.operations import OPERATIONS, message_bytes
from actor.hf.weight_table import weight_table
from actor.trainer import Trainer
from actor.weight_plan import Holders, buckets_of, model_sources, portions_of
from actor.weight_sender import WeightSender
from rlpipe.config.actor import ActorConfig
from rlpipe.config.layout import ActorLayout
from rlpipe.model.model_reader import trainable_model
from rlpipe.shared.errors import WeightSyncError
from rlpipe.shared.weights import BUFFERS, WeightBucket, WeightGroup
from rollout.weights import receiver
from rollout.weights.sources import Broadcast

BUCKET_BYTES = 20_000
_TIMEOUT = timedelta(seconds=400)  # for others to be ready, on a busy machine


def send_twice(rank: int, count: int, path: Path, layouts: dict[str, Any], groups: dict[str, WeightGroup]) -> Any:
    """Two sends per layout, the second after a change of the weights; returns the plans and this process's reports."""
    results = {}
    for name, parallel in layouts.items():
        policy = trainer(path, count, parallel=parallel)
        sender = sender_of(policy)
        error = ""
        if rank == 0:
            try:
                sender.send(verify=False)
            except WeightSyncError as raised:
                error = str(raised)
        dist.barrier()
        _join(sender, groups[name])
        reports = [sender.send(verify=True)]
        double(policy)
        reports.append(sender.send(verify=False))
        sender.leave()
        results[name] = (sender.plans["merged"], reports, error)
    return results


def receive_twice(
    rank: int, count: int, path: Path, layouts: dict[str, Any], groups: dict[str, WeightGroup], senders: int
) -> dict[str, Any]:
    """What an engine does: per group two updates; what the model holds after each, the first one's checksums, and
    the most bytes that were under way."""
    results = {}
    for name, group in groups.items():
        engine = Engine(path, layouts[name], senders)
        engine.join(group, rank)
        sums = engine.update(verify=True).checksums
        first = engine.values()
        engine.update()
        most = engine.source.most_bytes
        engine.leave()
        results[name] = (first, engine.values(), sums, most)
    return results


def send_to_a_lost_engine(
    rank: int, count: int, path: Path, layouts: list[dict[str, Any]], groups: list[WeightGroup], lost: Path
) -> dict[str, Any]:
    """A whole update, one in which an engine is lost (`lost` is there then), one to the other engines alone, and one
    under another layout."""
    policy = trainer(path, count, parallel=layouts[0])
    sender = sender_of(policy)
    _join(sender, groups[0])
    with exchanges() as seen:
        whole = sender.send(verify=True)
    double(policy)
    left = weakref.ref(sender._transport) if sender._transport is not None else lambda: None
    gc.disable()
    broken = sender.send(verify=False, engine_failed=lost.exists)
    assert left() is None, "something holds the broken group, on which the other engines wait"
    gc.enable()
    _join(sender, groups[1])
    healed = sender.send(verify=True)
    sender.leave()
    policy = trainer(path, count, parallel=layouts[1])
    resharded = sender_of(policy)
    _join(resharded, groups[2])
    last = resharded.send(verify=True)
    resharded.leave()
    return {"plan": sender.plans["merged"], "reports": (whole, broken, healed, last), "exchanges": seen}


def receive_beside_a_lost_engine(
    rank: int,
    count: int,
    path: Path,
    layouts: list[dict[str, Any]],
    groups: list[WeightGroup],
    senders: int,
    lost: Path,
) -> dict[str, Any]:
    """Engine 0 gets the four updates; engine 1 is another process that ends within the second one."""
    engine = Engine(path, layouts[0], senders)
    doomed = multiprocessing.get_context("spawn").Process(target=_end_in_an_update, args=(engine.plan, groups[0]))
    doomed.start()
    engine.join(groups[0], 0)
    answers, values = [engine.update(verify=True)], [engine.values()]
    watching = _when_ended(doomed, lost)
    answers.append(engine.update())
    watching.join()
    has_left = not engine.updater._model_update_group
    for layout, group in zip(layouts, groups[1:], strict=True):
        engine.plan = plan_of(path, layout, senders)
        engine.join(group, 0)
        answers.append(engine.update(verify=True))
        values.append(engine.values())
    engine.leave()
    return {"answers": answers, "values": values, "has_left": has_left, "exit": doomed.exitcode}


def _when_ended(process: Any, lost: Path) -> Any:
    """As Ray tells the actor."""
    import threading

    def wait() -> None:
        process.join()
        lost.touch()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def _end_in_an_update(plan: tuple[WeightBucket, ...], group: WeightGroup) -> None:
    source = Broadcast(process_groups(group, 1), "cpu", group.in_flight_bytes)
    for _ in source.buckets(plan):
        pass
    for number, _ in enumerate(source.buckets(plan)):
        if number == 1:  # it has asked for no more than the next few
            os._exit(7)


class Engine:
    """A model that keeps Hugging Face tensors by name, behind the receiver that SGLang's processes have."""

    def __init__(self, path: Path, parallel: dict[str, Any], senders: int) -> None:
        self.plan = plan_of(path, parallel, senders)
        self.model = Model(read_tensors(path))
        self.updater = SimpleNamespace(_model_update_group={}, get_model=lambda: self.model)

    def join(self, group: WeightGroup, reader: int) -> None:
        self.source = Watched(process_groups(group, reader), "cpu", group.in_flight_bytes)
        self.updater._model_update_group["weights"] = self.source

    def update(self, verify: bool = False) -> Any:
        os.environ[receiver.VERIFY_VARIABLE] = str(int(verify))
        return receiver._received(self.updater, self.plan, "weights")

    def values(self) -> dict[str, Any]:
        return {name: tensor.detach().numpy().copy() for name, tensor in self.model.by_name.items()}

    def leave(self) -> None:
        assert receiver.leave_group(self.updater, "weights")[0]


class Watched(Broadcast):
    """Notes the most bytes that were asked for and not yet loaded."""

    most_bytes = 0

    def _begin(self, bucket: WeightBucket) -> Any:
        self.most_bytes = max(self.most_bytes, bucket.size_bytes + sum(flat.nbytes for _, flat in self._under_way))
        return super()._begin(bucket)


class Model(torch.nn.Module):
    """Zeros in the shapes of `tensors`."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.kept = torch.nn.ParameterList(torch.zeros_like(tensor) for tensor in tensors.values())
        self.by_name = dict(zip(tensors, self.kept, strict=True))

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.by_name[name].data.copy_(tensor)


def plan_of(path: Path, parallel: dict[str, Any], processes: int) -> tuple[WeightBucket, ...]:
    """As the driver would tell it, made without any process of the actor."""
    model = replace(trainable_model(path), fused_experts=True)
    table = weight_table(model, padded_vocab_size=model.vocab_size, with_mtp=False)
    sources = model_sources((entry for entry in table if entry.copy_of is None), "float32")
    layout = ActorLayout.of(ActorConfig(processes=processes, parallel=parallel))
    holders = Holders(layout, model.layers)
    return buckets_of(portions_of(sources, holders, BUCKET_BYTES), holders, BUCKET_BYTES)


def sender_of(policy: Trainer) -> WeightSender:
    layout = ActorLayout.of(policy.options.actor)
    return WeightSender(policy.policy, policy.description, "float32", BUCKET_BYTES, layout)


def double(policy: Trainer) -> None:
    with torch.no_grad():
        for chunk in policy.policy:
            for parameter in chunk.parameters():
                parameter.mul_(2)


@contextmanager
def exchanges() -> Iterator[Counter[tuple[str, int]]]:
    """Bytes of this process's exchanges in the block, by operation and size of the group."""
    seen: Counter[tuple[str, int]] = Counter()

    class Note:
        def around(self, operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def noting(group: Any, *arguments: Any, **keywords: Any) -> Any:
                seen[operation, group.size()] += message_bytes([*arguments, *keywords.values()])
                return call(group, *arguments, **keywords)

            return noting if operation in OPERATIONS else call

    stop = listen(Note())
    try:
        yield seen
    finally:
        stop()


def send_through_buffers(
    rank: int, count: int, path: Path, layouts: dict[str, Any], letters: list[dict[str, Path]]
) -> dict[str, Any]:
    """Each process feeds a reader of its own, twice; it leaves word in `letters[rank]`."""
    results = {}
    for name, parallel in layouts.items():
        policy = trainer(path, count, parallel=parallel)
        sender = WeightSender(policy.policy, policy.description, "bfloat16", BUCKET_BYTES, None)
        invite(letters[rank][name], sender.listen(), sender.plans["merged"])
        senders = tuple(range(count))
        group = WeightGroup("one engine on all devices", ("a", "b"), 0, senders, 2, BUFFERS)
        assert not sender.join([group], dist.HashStore(), _TIMEOUT.total_seconds())
        results[name] = [sender.send(verify=True)]
        double(policy)
        results[name].append(sender.send(verify=True))
        sender.leave()
    return results


def send_to_failing_readers(rank: int, count: int, path: Path, letters: list[Path]) -> list[str]:
    """What the sender says to each kind of failure."""
    policy = trainer(path, count)
    errors = []
    for letter in letters:
        sender = WeightSender(policy.policy, policy.description, "bfloat16", BUCKET_BYTES, None)
        invite(letter, sender.listen(), sender.plans["merged"])
        sender.join([WeightGroup("pair", ("a",), 0, (0,), 1, BUFFERS)], dist.HashStore(), 60)
        errors.append(sender.send(verify=False).failure)
        sender.leave()
    return errors


def _join(sender: WeightSender, group: WeightGroup) -> None:
    failure = sender.join([group], store_of(group), _TIMEOUT.total_seconds())
    assert not failure, failure


def store_of(group: WeightGroup) -> dist.Store:
    return dist.TCPStore(group.address_of(0), group.port, is_master=False, timeout=_TIMEOUT)


def process_groups(group: WeightGroup, reader: int) -> dict[int, dist.ProcessGroup]:
    """As SGLang joins: a plain client of the senders' store, in groups apart from the default one."""
    groups = {}
    for sender in group.senders:
        name = group.name_of(sender)
        prefixed = dist.PrefixStore(name, store_of(group))
        size = 1 + group.readers
        made, _ = _new_process_group_helper(
            size, 1 + reader, [], dist.Backend(group.backend), prefixed, group_name=name, timeout=_TIMEOUT
        )
        _world.pg_group_ranks[made] = {index: index for index in range(size)}
        groups[sender] = made
    return groups
