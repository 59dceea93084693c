"""`ModelDescription` + actor configuration -> Megatron's TransformerConfig."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from actor.layers.gdn_backend import choose_gdn_backend
from rlpipe.config.actor import ActorConfig, ParallelConfig
from rlpipe.model.description import ModelDescription
from rlpipe.shared.errors import ModelError


def transformer_config(model: ModelDescription, actor: ActorConfig) -> TransformerConfig:
    """The configuration that Megatron's modules read.

    Raises:
        ModelError: the parallel layout does not divide the model.
    """
    check_layout(model, actor.parallel)
    if actor.train_mtp and model.mtp_layers != 1:
        raise ModelError(
            f"actor.train_mtp is on, but {model.architecture} has {model.mtp_layers} multi-token-prediction layers "
            "(exactly 1 can be trained): set actor.train_mtp to false"
        )
    config = TransformerConfig(
        **_sizes(model),
        **_experts(model),
        **_layout(actor.parallel),
        **_numerics(actor),
        **_recompute(actor),
        mtp_num_layers=1 if actor.train_mtp else None,
        mtp_loss_scaling_factor=actor.mtp_loss_weight,
    )
    config.gdn_sizes = model.gated_delta_net
    if model.gated_delta_net is not None:
        config.gdn_backend = choose_gdn_backend(actor.gdn_backend, model.gated_delta_net, actor.dtype).backend
    return config


def check_layout(model: ModelDescription, parallel: ParallelConfig) -> None:
    """Raise ModelError unless every size divides over the ranks that share it."""
    tensor, context = parallel.tensor, parallel.context
    divisions = [
        ("num_attention_heads", model.heads, "actor.parallel.tensor", tensor),
        (
            "num_hidden_layers",
            model.layers,
            "actor.parallel.pipeline x virtual_pipeline",
            parallel.pipeline * (parallel.virtual_pipeline or 1),
        ),
    ]
    if not all(model.expert_layers):
        divisions.append(("intermediate_size", model.mlp_width, "actor.parallel.tensor", tensor))
    if model.experts is not None:
        shared = model.experts.shared_width
        divisions.append(("num_experts", model.experts.experts, "actor.parallel.expert", parallel.expert))
        divisions.append(("shared_expert_intermediate_size", shared, "actor.parallel.tensor", tensor))
    if model.gated_delta_net is not None:
        heads, product = model.gated_delta_net.key_heads, "actor.parallel.tensor x context"
        divisions.append(("linear_num_key_heads", heads, product, tensor * context))
    for name, size, where, parts in divisions:
        if size % parts:
            raise ModelError(f"{name} = {size} of {model.architecture} does not divide by {where} = {parts}")
    if max(tensor, model.kv_heads) % min(tensor, model.kv_heads):
        raise ModelError(
            f"num_key_value_heads = {model.kv_heads} of {model.architecture} and actor.parallel.tensor = {tensor}: "
            "one must be a multiple of the other"
        )
    if model.experts is None and parallel.expert > 1:
        raise ModelError(f"actor.parallel.expert = {parallel.expert}, but {model.architecture} has no experts: use 1")
    if model.experts is not None and tensor > 1 and not parallel.sequence:
        raise ModelError("experts with actor.parallel.tensor above 1 need actor.parallel.sequence = true")


def _sizes(model: ModelDescription) -> dict[str, Any]:
    return {
        "num_layers": model.layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.mlp_width or model.hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_epsilon,
        "layernorm_zero_centered_gamma": model.zero_centered_norm,
        "qk_layernorm": model.qk_norm,
        "attention_output_gate": model.attention_output_gate,
        "add_qkv_bias": model.qkv_bias,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _experts(model: ModelDescription) -> dict[str, Any]:
    """Routing. Normalized top-k of a softmax over all experts equals a softmax over the top k (`pre_softmax` off)."""
    if model.experts is None:
        return {"moe_token_dispatcher_type": "alltoall"}
    sizes = model.experts
    return {
        "num_moe_experts": sizes.experts,
        "moe_layer_freq": [int(flag) for flag in model.expert_layers],
        "moe_router_topk": sizes.top_k,
        "moe_router_pre_softmax": not sizes.normalize_top_k,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_ffn_hidden_size": sizes.width,
        "moe_shared_expert_intermediate_size": sizes.shared_width or None,
        "moe_shared_expert_gate": bool(sizes.shared_width),
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def _layout(parallel: ParallelConfig) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "sequence_parallel": parallel.sequence,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1,
        "variable_seq_lengths": True,
        "batch_p2p_comm": torch.cuda.is_available(),
        "deallocate_pipeline_outputs": True,
    }


def _numerics(actor: ActorConfig) -> dict[str, Any]:
    """Everything that needs Transformer Engine or Apex stays off; weights come from a checkpoint."""
    dtype = getattr(torch, actor.dtype)
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "transformer_impl": "local",
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "perform_initialization": False,
    }


def _recompute(actor: ActorConfig) -> dict[str, Any]:
    granularity = actor.recompute.granularity
    if granularity == "none":
        return {}
    if granularity == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": list(actor.recompute.modules)}
