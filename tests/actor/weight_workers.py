"""The actor's processes that send weights, and a process that receives them; imports Megatron."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from buffer_reader import invite
from torch.distributed.distributed_c10d import _new_process_group_helper, _world
from train_workers import trainer

from actor.hf.export import export_plan
from actor.weight_sender import WeightSender, plan_buckets
from rlpipe.model.model_reader import trainable_model
from rlpipe.shared.errors import WeightSyncError
from rlpipe.shared.weights import BUFFERS, WeightBucket, WeightGroup, checksum

BUCKET_BYTES = 20_000
_TIMEOUT = timedelta(seconds=120)


def send_twice(rank: int, count: int, path: Path, layouts: dict[str, Any], groups: dict[str, WeightGroup]) -> Any:
    """Two sends per layout, the second after a change of the weights; rank 0 returns the plans and reports."""
    results = {}
    for name, parallel in layouts.items():
        policy = trainer(path, count, parallel=parallel)
        sender = WeightSender(policy.policy, policy.description, "float32", BUCKET_BYTES)
        error = ""
        if rank == 0:
            try:
                sender.send(verify=False)
            except WeightSyncError as raised:
                error = str(raised)
        dist.barrier()
        sender.join([groups[name]], _store(groups[name]) if rank == 0 else dist.HashStore(), 60)
        reports = [sender.send(verify=True)]
        with torch.no_grad():
            for chunk in policy.policy:
                for parameter in chunk.parameters():
                    parameter.mul_(2)
        reports.append(sender.send(verify=False))
        sender.leave()
        results[name] = (sender.plans["merged"], reports, error)
    return results


def receive_twice(rank: int, count: int, path: Path, groups: dict[str, WeightGroup]) -> dict[str, Any]:
    """What an engine does: per group two rounds of buckets; the tensors by name and the checksums of the buckets."""
    plan = plan_buckets(export_plan(replace(trainable_model(path), fused_experts=True), "float32"), BUCKET_BYTES)
    results = {}
    for name, group in groups.items():
        joined = _joined(group)
        results[name] = [_round(plan, joined) for _ in range(2)]
    return results


def send_through_buffers(
    rank: int, count: int, path: Path, layouts: dict[str, Any], letters: list[dict[str, Path]]
) -> dict[str, Any]:
    """Each process feeds a reader of its own, twice; it leaves word in `letters[rank]`."""
    results = {}
    for name, parallel in layouts.items():
        policy = trainer(path, count, parallel=parallel)
        sender = WeightSender(policy.policy, policy.description, "bfloat16", BUCKET_BYTES)
        invite(letters[rank][name], sender.listen(), sender.plans["merged"])
        group = WeightGroup("one engine on all devices", tuple("ab"[:count]), 0, 2 * count, BUFFERS)
        sender.join([group], dist.HashStore(), 60)
        results[name] = [sender.send(verify=True)]
        with torch.no_grad():
            for chunk in policy.policy:
                for parameter in chunk.parameters():
                    parameter.mul_(2)
        results[name].append(sender.send(verify=True))
        sender.leave()
    return results


def send_to_failing_readers(rank: int, count: int, path: Path, letters: list[Path]) -> list[str]:
    """What the sender says to each kind of failure."""
    policy = trainer(path, count)
    errors = []
    for letter in letters:
        sender = WeightSender(policy.policy, policy.description, "bfloat16", BUCKET_BYTES)
        invite(letter, sender.listen(), sender.plans["merged"])
        sender.join([WeightGroup("pair", ("a",), 0, 2, BUFFERS)], dist.HashStore(), 60)
        errors.append(sender.send(verify=False).failure)
        sender.leave()
    return errors


def _store(group: WeightGroup) -> dist.Store:
    return dist.TCPStore(group.address_of(0), group.port, group.world_size, is_master=False, timeout=_TIMEOUT)


def _joined(group: WeightGroup) -> dist.ProcessGroup:
    """As SGLang joins: a plain client of the sender's store, in a group apart from the default one."""
    made, _ = _new_process_group_helper(
        group.world_size,
        1,
        [],
        dist.Backend(group.backend),
        dist.PrefixStore(group.name, _store(group)),
        group_name=group.name,
        timeout=_TIMEOUT,
    )
    _world.pg_group_ranks[made] = {0: 0, 1: 1}
    return made


def _round(plan: tuple[WeightBucket, ...], group: dist.ProcessGroup) -> tuple[dict[str, Any], list[str]]:
    tensors, sums = {}, []
    for bucket in plan:
        dtype = getattr(torch, bucket.tensors[0].dtype)
        flat = torch.empty(bucket.size_bytes // dtype.itemsize, dtype=dtype)
        dist.broadcast(flat, src=0, group=group)
        sums.append(checksum(flat.view(torch.uint8).numpy().data))
        parts = flat.split([spec.elements for spec in bucket.tensors])
        tensors |= {
            spec.name: part.reshape(spec.shape).numpy() for spec, part in zip(bucket.tensors, parts, strict=True)
        }
    return tensors, sums
