"""Routed experts as two stacked weights and two grouped matrix products."""

from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule

from actor.layers.expert_lora import ExpertsLora, SharedExpertsLora
from actor.layers.expert_rows import grouped_product
from actor.layers.float8_weight import used_whole
from actor.layers.swiglu import weighted_swiglu

_Lora: TypeAlias = ExpertsLora | SharedExpertsLora | None


class GroupedExperts(MegatronModule):
    """This rank's experts (SwiGLU, no bias, never split within: expert tensor parallelism is 1).

    weight1: [local experts, 2 x width, hidden], gate above up. weight2: [local experts, hidden, width].
    Both are marked `allreduce = False`: stock code joins expert gradients over the expert data-parallel group only
    when EP > 1, which loses the other tensor-parallel ranks' tokens where TP > 1 and EP = 1 (layers.py:829, B5). They
    are marked `tensor_model_parallel`, so that the gradient norm counts them on every tensor-parallel rank: the
    distributed optimizer gives each of those ranks its own part.
    """

    lora1: "_Lora"
    lora2: "_Lora"

    def __init__(
        self, num_local_experts: int, config: Any, submodules: object = None, pg_collection: Any = None
    ) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self.expert_group, self.replica_group = pg_collection.ep, pg_collection.expt_dp
        width, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.weight1 = self._weight((num_local_experts, 2 * width, hidden), config.init_method)
        self.weight2 = self._weight((num_local_experts, hidden, width), config.output_layer_init_method)
        self.register_module("lora1", None)
        self.register_module("lora2", None)

    def _weight(self, shape: tuple[int, ...], initialize: Any) -> torch.nn.Parameter:
        device = torch.cuda.current_device()
        weight: Any = torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype, device=device))
        weight.allreduce = False
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
        if self.config.perform_initialization:
            with get_cuda_rng_tracker().fork("expert-parallel-rng"):
                initialize(weight)
        return weight

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probabilities: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """tokens: [n, hidden] sorted by expert; tokens_per_expert: [local experts]; probabilities: [n]."""
        if tokens.shape[0] == 0:
            # No token came to this rank: keep every trained weight in the graph, so that its gradient is zero and not
            # absent, and the probabilities, whose backward is an all-to-all that the other expert ranks wait in.
            trained = sum(weight.sum() for weight in self.parameters() if weight.requires_grad)
            return (tokens * probabilities.unsqueeze(-1) + 0 * trained).to(tokens.dtype), None
        offsets = tokens_per_expert.to(tokens.device).cumsum(0).to(torch.int32)
        gate_up = self._product(tokens, self.weight1, offsets, self.lora1)
        inner = weighted_swiglu(gate_up, probabilities.unsqueeze(-1))
        return self._product(inner, self.weight2, offsets, self.lora2), None

    def _product(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        offsets: torch.Tensor,
        lora: _Lora,
    ) -> torch.Tensor:
        with used_whole(weight) as made:
            output = grouped_product(rows, made, offsets)
        return output if lora is None else lora.add_to(output, rows, offsets)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, ShardedTensor]:
        """The stacked weights, cut over expert-parallel ranks along the expert dimension."""
        prepended = len(sharded_offsets)
        state = {
            prefix + name: ShardedTensor.from_rank_offsets(
                prefix + name,
                getattr(self, name),
                *sharded_offsets,
                (prepended, self.expert_group.rank(), self.expert_group.size()),
                replica_id=(0, 0, self.replica_group.rank()),
                prepend_axis_num=prepended,
            )
            for name in ("weight1", "weight2")
        }
        for name, lora in (("lora1", self.lora1), ("lora2", self.lora2)):
            if lora is not None:
                state |= lora.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return state

    def backward_dw(self) -> None:
        """Weight gradients are never deferred here."""
