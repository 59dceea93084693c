"""What all processes of the actor send together, without engines; imports Megatron."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from actor.hf.export import iter_export
from actor.models.policy_model import PolicyModel
from actor.weight_sender import WeightSender
from rlpipe.config.layout import ActorLayout
from rlpipe.model.description import TrainableModel
from rlpipe.shared.block_fp8 import quantized
from rlpipe.shared.weights import StackedExperts, WeightBucket, WeightContent, WeightGroup


def sent_as_exported(
    chunks: Sequence[PolicyModel], description: TrainableModel, layout: ActorLayout, with_mtp: bool = False
) -> bool:
    """Whether it is bit by bit what an export gives, each number once; and for engines with 8 bits what quantising it
    gives. Collective."""
    stacked = replace(description, fused_experts=True, fused_mtp_experts=True)
    exported = iter_export(chunks, stacked, everywhere=True, with_mtp=with_mtp)
    whole = [(name, tensor.clone()) for name, tensor in exported if tensor is not None]
    return all(
        _are_equal(
            sent_tensors(WeightSender(chunks, description, "float32", 5_000, layout, with_mtp, kind), "merged"),
            {name: part for pair in whole for name, part in quantized(*pair, kind)},
        )
        for kind in ("none", "fp8_all")
    )


def _are_equal(sent: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> bool:
    for name, tensor in sent.items():
        experts = StackedExperts.of_name(name)
        if experts is None:
            wanted = whole[name]
        else:
            wanted = whole[f"{experts.root}.{experts.kind}{experts.ending}"][experts.first :]
        if tensor.dtype != wanted.dtype or not torch.equal(tensor.float(), wanted[: len(tensor)].float()):
            return False
    return sum(map(torch.numel, sent.values())) == sum(map(torch.numel, whole.values()))


def sent_tensors(sender: WeightSender, content: WeightContent) -> dict[str, torch.Tensor]:
    """What all processes hand over together, in the order of the plan."""
    rank = dist.get_rank()
    kept = _Kept()
    sender._transport, sender._senders = kept, {rank: WeightGroup("kept", (), 0, (rank,), 1, "none")}
    sender.send(verify=False, content=content)
    every: list[list[torch.Tensor]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, kept.buckets)
    found, left = {}, [iter(buckets) for buckets in every]
    for bucket in sender.plans[content]:
        pieces = bucket.pieces(next(left[bucket.sender]))
        found |= {spec.name: piece for spec, piece in zip(bucket.tensors, pieces, strict=True)}
    assert not any(True for buckets in left for _ in buckets)
    return found


class _Kept:
    """A transport that keeps the buckets."""

    def __init__(self) -> None:
        self.buckets: list[torch.Tensor] = []

    def room(self, bucket: WeightBucket) -> torch.Tensor:
        return torch.empty(bucket.size_bytes, dtype=torch.uint8)

    def publish(self, flat: torch.Tensor, engine_failed: Callable[[], bool]) -> None:
        self.buckets.append(flat)

    def finish(self, engine_failed: Callable[[], bool]) -> None:
        pass

    def leave(self) -> None:
        pass
