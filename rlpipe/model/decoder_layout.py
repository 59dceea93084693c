"""The layers of a decoder, read from a config.json: the functions that a row of `rlpipe.model.families` is made of.

Sizes must be in the file. Patterns that a file may leave out (which layers are sparse, windowed or linear, the width
of a head) have the defaults of transformers' model code for that type, because that is the model which would be built.
"""

from collections.abc import Callable

from rlpipe.model.config_section import Section
from rlpipe.model.description import (
    ExpertSizes,
    FeedForwardSizes,
    GatedDeltaNetSizes,
    LatentAttentionSizes,
    LayerKind,
    MixerSizes,
)

_DELTA_NET_KEYS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_EXPERT_COUNTS = ("num_experts", "num_local_experts")
_MOST_LAYERS = 10_000


def full_attention(section: Section, *, head_dim: int | None = None) -> MixerSizes:
    """Every layer attends to everything before. `head_dim`: width of a head where the file has no such key."""
    return _same_window(section, None, head_dim=head_dim)


def one_window(section: Section, *, default_window: int | None) -> MixerSizes:
    """Mistral and Mixtral: one window for all layers; null is none."""
    window = None
    if section.has("sliding_window") or (section.lacks("sliding_window") and default_window is not None):
        window = section.integer("sliding_window", default_window)
    return _same_window(section, window)


def switched_window(section: Section) -> MixerSizes:
    """Qwen3-MoE: `use_sliding_window` puts every layer into the window."""
    return _same_window(section, _qwen_window(section))


def chosen_windows(
    section: Section, *, head_dim: int | None = None, default_windowed: Callable[[int, int], bool]
) -> MixerSizes:
    """Qwen2 and Qwen3: `layer_types` names the windowed layers, else `default_windowed(layer, max_window_layers)`."""
    window = _qwen_window(section)
    max_window_layers = section.integer("max_window_layers", 28, minimum=0)
    default: list[LayerKind] = [
        "sliding_attention" if window is not None and default_windowed(layer, max_window_layers) else "full_attention"
        for layer in range(_layers(section))
    ]
    known: set[LayerKind] = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
    return _attention(section, _layer_types(section, default, known), head_dim=head_dim, window=window)


def from_layer(layer: int, max_window_layers: int) -> bool:
    return layer >= max_window_layers


def every_other_before(layer: int, max_window_layers: int) -> bool:
    return layer % 2 == 0 and layer < max_window_layers


def hybrid_delta_net(section: Section, *, fused_projections: bool) -> MixerSizes:
    """Qwen3-Next and Qwen3.5: full attention with an output gate in every n-th layer, Gated DeltaNet in the others."""
    interval = section.integer("full_attention_interval", 4)
    default: list[LayerKind] = [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(_layers(section))
    ]
    kinds = _layer_types(section, default, {"full_attention", "linear_attention"})
    gate = section.boolean("attn_output_gate", True)
    section.ignore(*_DELTA_NET_KEYS)
    delta_net = _delta_net(section, fused_projections) if "linear_attention" in kinds else None
    return _attention(section, kinds, head_dim=256, output_gate=gate, delta_net=delta_net)


def latent_attention(section: Section) -> MixerSizes:
    """DeepSeek: multi-head latent attention in every layer."""
    section.ignore("q_lora_rank", "num_key_value_heads", "head_dim", "qk_head_dim")
    heads = section.integer("num_attention_heads")
    sizes = LatentAttentionSizes(
        query_rank=section.integer("q_lora_rank") if section.has("q_lora_rank") else None,
        key_value_rank=section.integer("kv_lora_rank"),
        nope_head_dim=section.integer("qk_nope_head_dim"),
        rope_head_dim=section.integer("qk_rope_head_dim"),
        value_head_dim=section.integer("v_head_dim"),
    )
    kind: LayerKind = "full_attention"
    return MixerSizes(
        layer_kinds=(kind,) * _layers(section),
        heads=heads,
        kv_heads=heads,
        head_dim=sizes.nope_head_dim + sizes.rope_head_dim,
        latent_attention=sizes,
    )


def dense(section: Section) -> FeedForwardSizes:
    return _feed_forwards(section, (False,) * _layers(section))


def experts(section: Section) -> FeedForwardSizes:
    """Qwen3.5: experts in every layer; its model code knows no dense ones."""
    for key, value in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        if section.get(key) not in (None, value):
            raise section.error(key, "this model type makes every layer a mixture of experts")
    return _feed_forwards(section, (True,) * _layers(section), lambda: _qwen_experts(section, shared=True))


def experts_by_step(section: Section, *, shared: bool) -> FeedForwardSizes:
    """Qwen: every `decoder_sparse_step`-th layer, counted from 1, has experts, but for `mlp_only_layers`, from 0."""
    step, dense_layers = section.integer("decoder_sparse_step", 1), section.items("mlp_only_layers")
    layers = range(_layers(section))
    outside = [layer for layer in dense_layers if layer not in layers]
    if outside:
        raise section.error("mlp_only_layers", f"{outside} are no layers of a model with {len(layers)}")
    any_experts = _expert_count(section) > 0
    section.ignore("moe_intermediate_size", "num_experts_per_tok")
    if shared:
        section.ignore("shared_expert_intermediate_size")
    sparse = tuple(any_experts and layer not in dense_layers and (layer + 1) % step == 0 for layer in layers)
    return _feed_forwards(section, sparse, lambda: _qwen_experts(section, shared=shared))


def mixtral_experts(section: Section) -> FeedForwardSizes:
    width = section.integer("intermediate_size")
    return _feed_forwards(
        section, (True,) * _layers(section), lambda: _routed(section, _expert_count(section), width=width)
    )


def experts_after_dense_layers(section: Section) -> FeedForwardSizes:
    """DeepSeek and GLM-4.5: the first layers are dense; shared experts have no gate."""
    if section.integer("moe_layer_freq", 1) != 1:
        raise section.error("moe_layer_freq", "only 1 can be counted: this model type knows no other")
    section.ignore("num_local_experts")
    first_sparse = section.integer("first_k_dense_replace", minimum=0)
    width = section.integer("moe_intermediate_size")
    sizes = _routed(
        section,
        section.integer("n_routed_experts"),
        width=width,
        shared_width=section.integer("n_shared_experts", 0, minimum=0) * width,
    )
    sparse = tuple(layer >= first_sparse for layer in range(_layers(section)))
    return _feed_forwards(section, sparse, lambda: sizes)


def _layers(section: Section) -> int:
    count = section.integer("num_hidden_layers")
    if count > _MOST_LAYERS:
        raise section.error("num_hidden_layers", f"no model has more than {_MOST_LAYERS:,}")
    return count


def _attention(
    section: Section,
    kinds: tuple[LayerKind, ...],
    *,
    head_dim: int | None = None,
    window: int | None = None,
    output_gate: bool = False,
    delta_net: GatedDeltaNetSizes | None = None,
) -> MixerSizes:
    hidden_size, heads = section.integer("hidden_size"), section.integer("num_attention_heads")
    kv_heads = section.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise section.error("num_key_value_heads", f"num_attention_heads {heads} is no multiple of it")
    if section.has("head_dim"):
        head_dim = section.integer("head_dim")
    elif head_dim is None or not section.lacks("head_dim"):
        head_dim = hidden_size // heads
        if hidden_size % heads:
            raise section.error("head_dim", f"hidden_size {hidden_size} is no multiple of num_attention_heads {heads}")
    return MixerSizes(
        layer_kinds=kinds,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        attention_output_gate=output_gate,
        window=window,
        gated_delta_net=delta_net,
    )


def _delta_net(section: Section, fused_projections: bool) -> GatedDeltaNetSizes:
    sizes = GatedDeltaNetSizes(
        key_heads=section.integer("linear_num_key_heads"),
        value_heads=section.integer("linear_num_value_heads"),
        key_dim=section.integer("linear_key_head_dim"),
        value_dim=section.integer("linear_value_head_dim"),
        conv_width=section.integer("linear_conv_kernel_dim"),
        fused_projections=fused_projections,
    )
    if sizes.value_heads % sizes.key_heads:
        raise section.error("linear_num_value_heads", f"no multiple of linear_num_key_heads {sizes.key_heads}")
    return sizes


def _qwen_window(section: Section) -> int | None:
    """Qwen's `sliding_window` means nothing unless `use_sliding_window` is set."""
    section.ignore("sliding_window")
    switched_on = section.boolean("use_sliding_window", False)
    if not switched_on or not (section.has("sliding_window") or section.lacks("sliding_window")):
        return None
    return section.integer("sliding_window", 4096)


def _same_window(section: Section, window: int | None, *, head_dim: int | None = None) -> MixerSizes:
    """Model code that ignores `layer_types` must not be given a list that says something else."""
    kind: LayerKind = "full_attention" if window is None else "sliding_attention"
    if any(name != kind for name in section.items("layer_types")):
        raise section.error("layer_types", f"this model type makes every layer {kind}")
    return _attention(section, (kind,) * _layers(section), head_dim=head_dim, window=window)


def _layer_types(section: Section, default: list[LayerKind], known: set[LayerKind]) -> tuple[LayerKind, ...]:
    names = section.items("layer_types") or default
    if len(names) != len(default):
        raise section.error("layer_types", f"{len(names)} entries for {len(default)} layers (num_hidden_layers)")
    strangers = sorted({str(name) for name in names} - known)
    if strangers:
        raise section.error("layer_types", f"{strangers} cannot be counted; this configuration knows {sorted(known)}")
    return tuple(names)


def _feed_forwards(
    section: Section, sparse: tuple[bool, ...], read_experts: Callable[[], ExpertSizes] | None = None
) -> FeedForwardSizes:
    """`read_experts` is called where a layer has experts; without dense layers the file need not have their width."""
    section.ignore("intermediate_size")
    needed = not all(sparse)
    return FeedForwardSizes(
        mlp_width=section.integer("intermediate_size", None if needed else 0, minimum=int(needed)),
        expert_layers=sparse,
        experts=read_experts() if read_experts is not None and any(sparse) else None,
    )


def _qwen_experts(section: Section, *, shared: bool) -> ExpertSizes:
    """The shared expert, where the type has one, is scaled by a gate of its own; a width of 0 means there is none."""
    return _routed(
        section,
        _expert_count(section),
        width=section.integer("moe_intermediate_size"),
        shared_width=section.integer("shared_expert_intermediate_size", minimum=0) if shared else 0,
        shared_gate=True,
    )


def _routed(
    section: Section, experts: int, *, width: int, shared_width: int = 0, shared_gate: bool = False
) -> ExpertSizes:
    per_token = section.integer("num_experts_per_tok")
    if per_token > experts:
        raise section.error("num_experts_per_tok", f"there are only {experts} experts")
    return ExpertSizes(experts, per_token, width, shared_width, shared_gate)


def _expert_count(section: Section) -> int:
    """`num_experts`, which newer files call `num_local_experts`."""
    counts = {key: section.integer(key, minimum=0) for key in _EXPERT_COUNTS if section.has(key)}
    if not counts:
        return section.integer(_EXPERT_COUNTS[0])
    if len(set(counts.values())) > 1:
        raise section.error(_EXPERT_COUNTS[0], f"contradicts {_EXPERT_COUNTS[1]} = {counts[_EXPERT_COUNTS[1]]}")
    return min(counts.values())
