"""`TrainableModel` + actor configuration -> Megatron's TransformerConfig."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from actor.layers.gdn_backend import choose_gdn_backend
from rlpipe.config.actor import ActorConfig, ParallelConfig
from rlpipe.model.actor_checks import check_actor
from rlpipe.model.description import TrainableModel


def transformer_config(model: TrainableModel, actor: ActorConfig) -> TransformerConfig:
    """The configuration that Megatron's modules read.

    Raises:
        ModelError: the model cannot do what `actor` asks for.
    """
    check_actor(model, actor)
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
    config.normalize_top_k = model.normalize_top_k
    if model.gated_delta_net is not None:
        config.gdn_backend = choose_gdn_backend(actor.gdn_backend, model.gated_delta_net, actor.dtype).backend
    return config


def _sizes(model: TrainableModel) -> dict[str, Any]:
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


def _experts(model: TrainableModel) -> dict[str, Any]:
    """Routing is `ReplayRouter`'s, which reads `config.normalize_top_k`: Megatron's own choice, `pre_softmax`, refuses
    one normalized expert per token."""
    if model.experts is None:
        return {"moe_token_dispatcher_type": "alltoall"}
    sizes = model.experts
    return {
        "num_moe_experts": sizes.experts,
        "moe_layer_freq": [int(flag) for flag in model.expert_layers],
        "moe_router_topk": sizes.top_k,
        "moe_router_pre_softmax": True,
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
    granularity = actor.recompute.chosen
    if granularity == "none":
        return {}
    if granularity == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": list(actor.recompute.modules)}
