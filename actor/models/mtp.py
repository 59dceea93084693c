"""Multi-token prediction: one extra decoder layer that predicts the token after next (as in Qwen3-Next and Qwen3.5).

It is trained by a cross entropy of its own on detached hidden states, embeddings and head: its loss moves the `mtp.*`
parameters and nothing else, so the policy gradient is the same with and without it.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from actor.layers.norm import Norm


class MtpDepth(MegatronModule):
    """norm(embedding of the next token) and norm(hidden state), projected together, one layer, a final norm."""

    def __init__(
        self, config: Any, *, layer_spec: ModuleSpec, layer_number: int, vp_stage: int | None = None, **_: object
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        hidden = config.hidden_size
        self.enorm = Norm(config, hidden, eps=config.layernorm_epsilon)
        self.hnorm = Norm(config, hidden, eps=config.layernorm_epsilon)
        self.eh_proj = ColumnParallelLinear(
            2 * hidden,
            hidden,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
        )
        number = config.num_layers + 1 - get_transformer_layer_offset(config, vp_stage)
        self.transformer_layer = build_module(layer_spec, config=config, vp_stage=vp_stage, layer_number=number)
        self.final_layernorm = Norm(config, hidden, eps=config.layernorm_epsilon)

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, rotary: torch.Tensor, sequences: PackedSeqParams
    ) -> torch.Tensor:
        """hidden, embedded (of the next token): [t, 1, h], a 1/TP slice under sequence parallelism; returns so."""
        joined, _ = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        joined = gather_from_tensor_model_parallel_region(joined)
        if self.config.sequence_parallel:
            joined = scatter_to_sequence_parallel_region(joined)
        out, _ = self.transformer_layer(
            hidden_states=joined, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=sequences
        )
        return self.final_layernorm(out)


def mtp_spec(layer_spec: ModuleSpec) -> ModuleSpec:
    """The block that GPTModel builds on its last stage."""
    depth = ModuleSpec(module=MtpDepth, params={"layer_spec": layer_spec})
    return ModuleSpec(
        module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[depth])
    )


class AddLoss(torch.autograd.Function):
    """Identity on `x` whose backward also sends 1 into `loss`: adds a loss that no caller has to know of."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.like = loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradients[0], torch.ones_like(ctx.like)
