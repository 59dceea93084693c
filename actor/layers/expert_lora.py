"""LoRA of routed experts: an adapter for each expert, or one for all experts of a layer."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from actor.layers.expert_rows import grouped_product
from actor.layers.lora import Lora, add_product


class ExpertsLora(Lora):
    """One adapter for each of this rank's experts: `a` [experts, rank, in], `b` [out, rank, experts] as in PEFT."""

    def shapes(self, weight: Tensor, pairs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        experts, out, wide = weight.shape
        return (experts, self.rank, wide), (out, self.rank, experts)

    def _mark(self, name: str, factor: Any) -> None:
        """As `GroupedExperts` marks its weights."""
        factor.allreduce = False
        factor.tensor_model_parallel, factor.partition_dim, factor.partition_stride = True, 0, 1

    def per_expert(self) -> Tensor:
        """`b` as [experts, out, rank]."""
        return self.b.permute(2, 0, 1)

    def delta(self) -> Tensor:
        return self.scale * torch.bmm(self.per_expert().float(), self.a.float())

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """One expert after another, so that no float32 copy of all of them exists."""
        out = torch.empty_like(weight)
        for expert, (a, b) in enumerate(zip(self.a, self.per_expert(), strict=True)):
            out[expert] = weight[expert].float().addmm(b.float(), a.float(), alpha=self.scale)
        return out

    def add_to(self, output: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
        """x: [n, in] and output: [n, out], sorted by expert up to `offsets` [experts]."""
        low = grouped_product(x, self.a, offsets)
        return output + self.scale * grouped_product(low, self.per_expert().contiguous(), offsets)

    def sharded_state_dict(self, prefix: str, offsets: tuple[Any, ...], metadata: dict[str, Any]) -> dict[str, Any]:
        """Cut over expert-parallel ranks along the expert dimension."""
        group, replicas = (
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_expert_data_parallel_group(),
        )
        return {
            prefix + name: ShardedTensor.from_rank_offsets(
                prefix + name,
                getattr(self, name),
                *offsets,
                (len(offsets) + axis, group.rank(), group.size()),
                replica_id=(0, 0, replicas.rank()),
                prepend_axis_num=len(offsets),
            )
            for name, axis in (("a", 0), ("b", 2))
        }


class SharedExpertsLora(Lora):
    """One adapter for all experts of a layer: `a` [rank, in], `b` [out, rank], whole on every rank.

    Every rank has the rows of its own experts, so gradients are summed over all ranks of the layer: over
    tensor-parallel ones as under sequence parallelism, which experts need there.
    """

    partial = ("a", "b")

    def shapes(self, weight: Tensor, pairs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        _, out, wide = weight.shape
        return (self.rank, wide), (out, self.rank)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        delta, out = self.delta(), torch.empty_like(weight)
        for expert in range(len(weight)):
            out[expert] = weight[expert].float() + delta
        return out

    def add_to(self, output: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
        """x: [n, in]; output: [n, out]."""
        return add_product(output, F.linear(x, self.a), self.b, self.scale)
