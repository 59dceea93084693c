"""The model families that rlpipe knows: one row each, and nothing else to edit for another one of known layers.

A row says how the layers of a family are read from its config.json. That is enough to count FLOPs and to plan memory;
a family with `training` can be trained too, and there every key of the file that is not understood is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rlpipe.model import decoder_layout as layout
from rlpipe.model.config_section import Section
from rlpipe.model.description import FeedForwardSizes, MixerSizes

_COMMON_KEYS = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_parameters",
        "rope_scaling",
        "attention_dropout",
        "head_dim",
        "attention_bias",
        "partial_rotary_factor",
    }
)
_WINDOW_KEYS = frozenset({"use_sliding_window", "layer_types"})
_EXPERT_KEYS = frozenset(
    {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "output_router_logits"}
)
_SPARSITY_KEYS = frozenset({"decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "use_sliding_window"})
_SHARED_EXPERT_KEYS = frozenset({"shared_expert_intermediate_size"})
_HYBRID_KEYS = frozenset(
    {
        "layer_types",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "mtp_num_hidden_layers",
        "num_nextn_predict_layers",
        "attn_output_gate",
    }
)


@dataclass(frozen=True)
class Training:
    """What the actor must know of a family beyond its layers.

    classes: what config.json calls the decoder. wrappers: what it calls a vision-language model around the decoder.
    keys: of config.json, those whose meaning is understood; others that may change the maths are refused by name.
    defaults: model type of transformers' configuration class, whose defaults a key that is left out has.
    partial_rotary: rotary embedding may leave channels out; transformers ignores in the other families what says so.
    normalize_top_k: whether the weights of chosen experts sum to 1; None where `norm_topk_prob` says it.
    """

    classes: tuple[str, ...]
    keys: frozenset[str]
    defaults: str
    wrappers: tuple[str, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    zero_centered_norm: bool = False
    partial_rotary: bool = False
    normalize_top_k: bool | None = None


@dataclass(frozen=True)
class Family:
    """How a model type's config section becomes its layers.

    deepstack: its vision tower may have inner mergers. training: None for a family that can only be counted.
    """

    mixers: Callable[[Section], MixerSizes]
    feed_forwards: Callable[[Section], FeedForwardSizes]
    deepstack: bool = False
    training: Training | None = None


_qwen3_hybrid = partial(Training, qk_norm=True, zero_centered_norm=True, partial_rotary=True)
_hybrid_mixers = partial(layout.hybrid_delta_net, fused_projections=False)

_qwen3_5 = Family(
    _hybrid_mixers,
    layout.dense,
    training=_qwen3_hybrid(
        ("Qwen3_5ForCausalLM",),
        _COMMON_KEYS | _HYBRID_KEYS,
        "qwen3_5_text",
        wrappers=("Qwen3_5ForConditionalGeneration",),
    ),
)
_qwen3_5_moe = Family(
    _hybrid_mixers,
    layout.experts,
    training=_qwen3_hybrid(
        ("Qwen3_5MoeForCausalLM",),
        _COMMON_KEYS | _HYBRID_KEYS | _EXPERT_KEYS | _SHARED_EXPERT_KEYS,
        "qwen3_5_moe_text",
        wrappers=("Qwen3_5MoeForConditionalGeneration",),
        normalize_top_k=True,
    ),
)
_qwen3_vl = Family(partial(layout.full_attention, head_dim=128), layout.dense, deepstack=True)
_qwen3_vl_moe = Family(layout.full_attention, partial(layout.experts_by_step, shared=False), deepstack=True)
_deepseek = Family(layout.latent_attention, layout.experts_after_dense_layers)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        layout.full_attention,
        layout.dense,
        training=Training(("LlamaForCausalLM",), _COMMON_KEYS | {"mlp_bias"}, "llama"),
    ),
    "mistral": Family(partial(layout.one_window, default_window=4096), layout.dense),
    "mixtral": Family(partial(layout.one_window, default_window=None), layout.mixtral_experts),
    "qwen2": Family(
        partial(layout.chosen_windows, default_windowed=layout.from_layer),
        layout.dense,
        training=Training(("Qwen2ForCausalLM",), _COMMON_KEYS | _WINDOW_KEYS, "qwen2", qkv_bias=True),
    ),
    "qwen2_moe": Family(
        partial(layout.chosen_windows, default_windowed=layout.every_other_before),
        partial(layout.experts_by_step, shared=True),
    ),
    "qwen3": Family(
        partial(layout.chosen_windows, head_dim=128, default_windowed=layout.from_layer),
        layout.dense,
        training=Training(("Qwen3ForCausalLM",), _COMMON_KEYS | _WINDOW_KEYS, "qwen3", qk_norm=True),
    ),
    "qwen3_moe": Family(
        layout.switched_window,
        partial(layout.experts_by_step, shared=False),
        training=Training(
            ("Qwen3MoeForCausalLM",), _COMMON_KEYS | _EXPERT_KEYS | _SPARSITY_KEYS, "qwen3_moe", qk_norm=True
        ),
    ),
    "qwen3_next": Family(
        partial(layout.hybrid_delta_net, fused_projections=True),
        partial(layout.experts_by_step, shared=True),
        training=_qwen3_hybrid(
            ("Qwen3NextForCausalLM",),
            _COMMON_KEYS | _HYBRID_KEYS | _EXPERT_KEYS | _SHARED_EXPERT_KEYS | _SPARSITY_KEYS,
            "qwen3_next",
        ),
    ),
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_text": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_vl_moe_text": _qwen3_vl_moe,
    "glm4_moe": Family(layout.full_attention, layout.experts_after_dense_layers),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
