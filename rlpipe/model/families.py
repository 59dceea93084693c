"""The supported model families: a pure function each, from a complete Hugging Face configuration to a description."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from rlpipe.model.config_file import read_config
from rlpipe.model.description import (
    ExpertSizes,
    GatedDeltaNetSizes,
    LayerKind,
    ModelDescription,
    Rope,
    RopeScaling,
)
from rlpipe.model.hub import model_folder
from rlpipe.model.trained_config import (
    WRAPPER_KEYS,
    fill_defaults,
    refuse_unknown_keys,
    stored_tensors,
)
from rlpipe.shared.errors import ModelError

Config = dict[str, Any]

FUSED_EXPERTS = ".mlp.experts.gate_up_proj"

COMMON_KEYS = frozenset(
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
WINDOW_KEYS = frozenset({"use_sliding_window", "layer_types"})
EXPERT_KEYS = frozenset(
    {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "output_router_logits"}
)
SPARSITY_KEYS = frozenset({"decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"})
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "num_experts_per_tok", "moe_intermediate_size"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
    *("linear_num_value_heads", "decoder_sparse_step"),
)
_SIZES_OR_NONE = ("num_experts", "num_local_experts", "shared_expert_intermediate_size")
_LARGEST_SIZE = 2**31 - 1
HYBRID_KEYS = frozenset(
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
class Family:
    """How to read one architecture.

    hybrid: layers may be linear attention, and rotary embedding may leave channels out; transformers ignores in the
    others what says so. wrapper: the text part may be nested in a vision-language configuration.
    """

    model_type: str
    describe: Callable[[Config], ModelDescription]
    understood: frozenset[str]
    hybrid: bool = False
    wrapper: bool = False


def read_model(source: str | Path | Config) -> ModelDescription:
    """Describe the model of a folder with a `config.json`, of a hub name, or of a configuration as a dictionary.

    Raises:
        ModelError: the architecture or a configuration key is not supported; the sentence names it.
    """
    source = source if isinstance(source, dict) else model_folder(source)
    file = read_config(source)
    raw, architecture = dict(file.raw), file.architecture
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError(f"architecture {architecture!r} is not supported: supported are {', '.join(sorted(FAMILIES))}")
    text = raw
    if family.wrapper and isinstance(raw.get("text_config"), dict):
        refuse_unknown_keys(raw, WRAPPER_KEYS, architecture)
        text = {**raw["text_config"], "tie_word_embeddings": raw.get("tie_word_embeddings", False)}  # never the text's
    refuse_unknown_keys(text, family.understood, architecture)
    config = fill_defaults(text, family.model_type)
    stored = stored_tensors(source)
    config["mtp_layers"] = _mtp_layers(text, stored)
    _refuse_other_maths(config, text)
    if not family.hybrid:
        _refuse_hybrid_maths(config, text, architecture)
    _check_sizes(config, text)
    return replace(
        family.describe(config),
        architecture=architecture,
        weight_prefix="model.language_model." if family.wrapper else "model.",
        fused_experts=any(name.endswith(f"{FUSED_EXPERTS}") and not name.startswith("mtp.") for name in stored),
        fused_mtp_experts=f"mtp.layers.0{FUSED_EXPERTS}" in stored,
        hf_config=raw,
    )


def _mtp_layers(text: Config, stored: frozenset[str]) -> int:
    """Qwen3-Next's configuration does not say that its weights hold a prediction layer."""
    for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        if text.get(key) is not None:
            return _size(key, text[key], 0)
    return int("mtp.fc.weight" in stored)


def _refuse_other_maths(config: Config, text: Config) -> None:
    """Refuse by name what would change the forward pass and is not built."""
    required = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "output_router_logits": False,
    }
    for key, value in required.items():
        if key in config and config[key] != value:
            raise ModelError(f"config.json has {key} = {config[key]!r}: only {value!r} is supported")
    if float(config.get("attention_dropout") or 0.0) > 0:
        raise ModelError(f"config.json has attention_dropout = {config['attention_dropout']}: only 0 is supported")
    if text.get("attn_output_gate", True) is not True:
        raise ModelError("config.json has attn_output_gate = false: these layers are only built with the gate")
    kinds = set(config.get("layer_types") or [])
    if unknown := kinds - {"full_attention", "linear_attention"}:
        raise ModelError(f"config.json has layer_types {sorted(unknown)}: only full and linear attention are supported")


def _refuse_hybrid_maths(config: Config, text: Config, architecture: str) -> None:
    """What transformers (and SGLang, mostly) would pass over."""
    for place in (text, config.get("rope_parameters") or {}):
        factor = place.get("partial_rotary_factor")
        if factor not in (None, 1):
            raise ModelError(
                f"config.json has partial_rotary_factor = {factor!r}, but {architecture} rotates all channels of a "
                "head whatever it says: remove it"
            )
    if "linear_attention" in (config.get("layer_types") or []):
        raise ModelError(
            f"config.json has linear_attention in layer_types, but {architecture} has full attention in all layers: "
            "correct layer_types"
        )


def _check_sizes(config: Config, text: Config) -> None:
    for key in (*_SIZES, *_SIZES_OR_NONE):
        if config.get(key) is not None:
            _size(key, config[key], int(key in _SIZES))
    _number("rms_norm_eps", config["rms_norm_eps"], 1.0)
    if "num_experts" in text and text.get("num_local_experts", text["num_experts"]) != text["num_experts"]:
        raise ModelError(
            f"config.json has num_experts = {text['num_experts']} and num_local_experts = {text['num_local_experts']}, "
            "which mean the same: correct one of them"
        )
    layers = config["num_hidden_layers"]
    if outside := [layer for layer in config.get("mlp_only_layers") or [] if layer not in range(layers)]:
        raise ModelError(f"config.json has mlp_only_layers {outside}, which a model with {layers} layers does not have")
    if config.get("layer_types") is not None and len(config["layer_types"]) != layers:
        raise ModelError(f"layer_types has {len(config['layer_types'])} entries for {layers} layers")


def _size(key: str, value: Any, least: int) -> int:
    if type(value) is not int or not least <= value <= _LARGEST_SIZE:
        raise ModelError(f"config.json has {key} = {value!r}: a whole number of at least {least} is needed")
    return value


def _number(key: str, value: Any, most: float = math.inf) -> float:
    if type(value) not in (int, float) or not 0 < value <= most or value == math.inf:
        raise ModelError(f"config.json has {key} = {value!r}: a number above 0 and up to {most} is needed")
    return float(value)


def _rope(config: Config, head_dim: int) -> Rope:
    """Rotary embedding; multi-modal sections (mrope) are the plain one for text, whose three positions are equal."""
    parameters = dict(config.get("rope_parameters") or {})
    kind = parameters.get("rope_type", "default")
    ignored = {"mrope_section", "mrope_interleaved", "type"}
    known = {"rope_type", "rope_theta", "partial_rotary_factor", *ignored}
    scaling = None
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        known |= set(names)
        scaling = RopeScaling(*(_number(name, parameters[name]) for name in names))  # type: ignore[arg-type]
    elif kind not in ("default", "mrope"):
        raise ModelError(f"config.json has rope type {kind!r}: supported are default and llama3")
    if unknown := sorted(set(parameters) - known):
        raise ModelError(f"config.json has unknown rope_parameters: {', '.join(unknown)}")
    share = parameters.get("partial_rotary_factor")
    dimensions = head_dim if share is None else int(head_dim * _number("partial_rotary_factor", share, 1.0))
    if dimensions % 2:
        raise ModelError(f"partial_rotary_factor rotates {dimensions} of {head_dim} channels: the number must be even")
    theta = _number("rope_theta", parameters.get("rope_theta"))
    return Rope(theta=theta, dimensions=dimensions, scaling=scaling)


def _dense(config: Config, *, qkv_bias: bool = False, qk_norm: bool = False) -> ModelDescription:
    """What all families share; the others replace fields of it."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")
    return ModelDescription(
        architecture="",
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=config.get("intermediate_size") or 0,
        layer_kinds=("full_attention",) * layers,
        expert_layers=(False,) * layers,
        norm_epsilon=config["rms_norm_eps"],
        rope=_rope(config, head_dim),
        tied_embeddings=bool(config["tie_word_embeddings"]),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        attention_output_gate=False,
        zero_centered_norm=False,
        gated_delta_net=None,
        experts=None,
        mtp_layers=config["mtp_layers"],
        weight_prefix="model.",
        max_positions=config["max_position_embeddings"],
        fused_experts=False,
        fused_mtp_experts=False,
        hf_config={},
    )


def _llama(config: Config) -> ModelDescription:
    return _dense(config)


def _qwen2(config: Config) -> ModelDescription:
    return _dense(config, qkv_bias=True)


def _qwen3(config: Config) -> ModelDescription:
    return _dense(config, qk_norm=True)


def _sparse_layers(config: Config) -> tuple[bool, ...]:
    """Layer i has experts unless listed in `mlp_only_layers` or skipped by `decoder_sparse_step` (transformers)."""
    step, dense = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or [])
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(config["num_hidden_layers"]))


def _expert_count(config: Config) -> int:
    """`num_experts`, which newer files call `num_local_experts`."""
    count = config.get("num_experts", config.get("num_local_experts"))
    if count is None:
        raise ModelError("config.json has no num_experts, which this architecture needs")
    return int(count)


def _with_experts(model: ModelDescription, config: Config, normalize: bool) -> ModelDescription:
    count = _expert_count(config)
    expert_layers = _sparse_layers(config) if count else (False,) * model.layers
    if not any(expert_layers):
        return model
    experts = ExpertSizes(
        experts=count,
        top_k=config["num_experts_per_tok"],
        width=config["moe_intermediate_size"],
        shared_width=config.get("shared_expert_intermediate_size") or 0,
        normalize_top_k=normalize,
    )
    if experts.top_k > count:
        raise ModelError(f"num_experts_per_tok = {experts.top_k} is more than num_experts = {count}")
    return replace(model, experts=experts, expert_layers=expert_layers)


def _qwen3_moe(config: Config) -> ModelDescription:
    return _with_experts(_qwen3(config), config, bool(config["norm_topk_prob"]))


def _hybrid(config: Config, *, fused_projections: bool) -> ModelDescription:
    sizes = GatedDeltaNetSizes(
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        conv_width=config["linear_conv_kernel_dim"],
        fused_projections=fused_projections,
    )
    if sizes.value_heads % sizes.key_heads:
        raise ModelError(
            f"linear_num_value_heads = {sizes.value_heads} is not a multiple of "
            f"linear_num_key_heads = {sizes.key_heads}"
        )
    kinds = cast(tuple[LayerKind, ...], tuple(config["layer_types"]))
    return replace(
        _qwen3(config),
        layer_kinds=kinds,
        gated_delta_net=sizes if "linear_attention" in kinds else None,
        attention_output_gate=True,
        zero_centered_norm=True,
    )


def _qwen3_next(config: Config) -> ModelDescription:
    return _with_experts(_hybrid(config, fused_projections=True), config, bool(config["norm_topk_prob"]))


def _qwen3_5(config: Config) -> ModelDescription:
    return _hybrid(config, fused_projections=False)


def _qwen3_5_moe(config: Config) -> ModelDescription:
    if _expert_count(config) == 0:
        raise ModelError("config.json has num_experts = 0, but all layers of this architecture have experts")
    return _with_experts(_hybrid(config, fused_projections=False), config, normalize=True)


_MOE = COMMON_KEYS | EXPERT_KEYS | SPARSITY_KEYS | {"use_sliding_window"}
_QWEN3_5_MOE = COMMON_KEYS | HYBRID_KEYS | EXPERT_KEYS | {"shared_expert_intermediate_size"}

_NEXT = _MOE | HYBRID_KEYS | {"shared_expert_intermediate_size"}
_QWEN3_5 = COMMON_KEYS | HYBRID_KEYS

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _llama, COMMON_KEYS | {"mlp_bias"}),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2, COMMON_KEYS | WINDOW_KEYS),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, COMMON_KEYS | WINDOW_KEYS),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _qwen3_moe, _MOE),
    "Qwen3NextForCausalLM": Family("qwen3_next", _qwen3_next, _NEXT, hybrid=True),
    "Qwen3_5ForCausalLM": Family("qwen3_5_text", _qwen3_5, _QWEN3_5, hybrid=True),
    "Qwen3_5ForConditionalGeneration": Family("qwen3_5_text", _qwen3_5, _QWEN3_5, hybrid=True, wrapper=True),
    "Qwen3_5MoeForCausalLM": Family("qwen3_5_moe_text", _qwen3_5_moe, _QWEN3_5_MOE, hybrid=True),
    "Qwen3_5MoeForConditionalGeneration": Family(
        "qwen3_5_moe_text", _qwen3_5_moe, _QWEN3_5_MOE, hybrid=True, wrapper=True
    ),
}
