"""One layer spec for every device: which module stands where in a Megatron decoder layer."""

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from actor.layers.attention import PackedAttention, PackedCoreAttention
from actor.layers.experts import GroupedExperts
from actor.layers.gated_delta_net import GatedDeltaNet
from actor.layers.lora import LoraColumnLinear, LoraRowLinear
from actor.layers.norm import Norm
from actor.layers.router import ReplayRouter
from rlpipe.model.description import LayerKind, TrainableModel


class TorchSpecProvider(LocalSpecProvider):
    """Modules in plain torch: no Transformer Engine, no Apex, CPU and CUDA."""

    def column_parallel_linear(self) -> type:
        return LoraColumnLinear

    def row_parallel_linear(self) -> type:
        return LoraRowLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return PackedCoreAttention

    def grouped_mlp_modules(self, use_grouped_gemm: bool, use_legacy_grouped_gemm: bool) -> tuple[type, Any]:
        return GroupedExperts, None


def layer_spec(model: TrainableModel, kind: LayerKind, has_experts: bool) -> ModuleSpec:
    """The spec of one decoder layer."""
    experts = model.experts.experts if model.experts is not None and has_experts else None
    mlp = get_mlp_module_spec_for_backend(TorchSpecProvider(), num_experts=experts, moe_grouped_gemm=True)
    if experts is not None:
        mlp.submodules.router = ReplayRouter
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=_attention_spec(model) if kind == "full_attention" else ModuleSpec(module=GatedDeltaNet),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention_spec(model: TrainableModel) -> ModuleSpec:
    qk_norm = Norm if model.qk_norm else IdentityOp
    return ModuleSpec(
        module=PackedAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=LoraColumnLinear,
            core_attention=PackedCoreAttention,
            linear_proj=LoraRowLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def block_spec(model: TrainableModel, config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline (and virtual) stage, and the final norm."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    last = first + get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [layer_spec(model, model.layer_kinds[i], model.expert_layers[i]) for i in range(first, last)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)
