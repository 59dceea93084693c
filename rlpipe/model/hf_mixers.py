"""The token mixers of a decoder, one for each layer, read from a Hugging Face config."""

from collections.abc import Callable

from rlpipe.flops.layers import GatedDeltaNet, GroupedQueryAttention, LatentAttention, Mixer
from rlpipe.model.hf_section import Section

Mixers = tuple[Mixer, ...]


def full_attention(section: Section, *, head_dim: int | None = None) -> Mixers:
    """Every layer attends to everything before. `head_dim`: width of a head where the file has no such key."""
    _check_fixed_pattern(section, "full_attention")
    return (_attention(section, head_dim=head_dim),) * layer_count(section)


def one_window(section: Section, *, default_window: int | None) -> Mixers:
    """Mistral and Mixtral: one window for all layers; null is none."""
    window = None
    if section.has("sliding_window") or (section.lacks("sliding_window") and default_window is not None):
        window = section.integer("sliding_window", default_window)
    return _same_window(section, window)


def switched_window(section: Section) -> Mixers:
    """Qwen3-MoE: `use_sliding_window` puts every layer into the window."""
    return _same_window(section, _qwen_window(section))


def chosen_windows(
    section: Section, *, head_dim: int | None = None, default_windowed: Callable[[int, int], bool]
) -> Mixers:
    """Qwen2 and Qwen3: `layer_types` names the windowed layers, else `default_windowed(layer, max_window_layers)`."""
    window = _qwen_window(section)
    max_window_layers = section.integer("max_window_layers", 28, minimum=0)
    default = [
        "sliding_attention" if window is not None and default_windowed(layer, max_window_layers) else "full_attention"
        for layer in range(layer_count(section))
    ]
    known: dict[str, Mixer] = {"full_attention": _attention(section, head_dim=head_dim)}
    if window is not None:
        known["sliding_attention"] = _attention(section, head_dim=head_dim, window=window)
    return _by_layer_types(section, default, known)


def hybrid_delta_net(section: Section) -> Mixers:
    """Qwen3-Next and Qwen3.5: full attention with an output gate in every n-th layer, Gated DeltaNet in the others."""
    interval = section.integer("full_attention_interval", 4)
    default = [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layer_count(section))
    ]
    gate = section.boolean("attn_output_gate", True)
    known: dict[str, Mixer] = {"full_attention": _attention(section, head_dim=256, gate=gate)}
    section.ignore(*(f"linear_{name}" for name in _DELTA_NET_SIZES))
    if "linear_attention" in (section.items("layer_types") or default):
        known["linear_attention"] = _delta_net(section)
    return _by_layer_types(section, default, known)


def latent_attention(section: Section) -> Mixers:
    """DeepSeek: multi-head latent attention in every layer."""
    section.ignore("q_lora_rank", "num_key_value_heads", "head_dim", "qk_head_dim")
    mixer = LatentAttention(
        hidden_size=section.integer("hidden_size"),
        heads=section.integer("num_attention_heads"),
        query_rank=section.integer("q_lora_rank") if section.has("q_lora_rank") else None,
        key_value_rank=section.integer("kv_lora_rank"),
        nope_head_dim=section.integer("qk_nope_head_dim"),
        rope_head_dim=section.integer("qk_rope_head_dim"),
        value_head_dim=section.integer("v_head_dim"),
    )
    return (mixer,) * layer_count(section)


def layer_count(section: Section) -> int:
    return section.integer("num_hidden_layers")


def _attention(
    section: Section, *, head_dim: int | None = None, gate: bool = False, window: int | None = None
) -> GroupedQueryAttention:
    hidden_size, heads = section.integer("hidden_size"), section.integer("num_attention_heads")
    key_value_heads = section.integer("num_key_value_heads", heads)
    if heads % key_value_heads:
        raise section.error("num_key_value_heads", f"num_attention_heads {heads} is no multiple of it")
    if section.has("head_dim"):
        head_dim = section.integer("head_dim")
    elif head_dim is None or not section.lacks("head_dim"):
        head_dim = hidden_size // heads
        if hidden_size % heads:
            raise section.error("head_dim", f"hidden_size {hidden_size} is no multiple of num_attention_heads {heads}")
    return GroupedQueryAttention(hidden_size, heads, key_value_heads, head_dim, gate, window)


_DELTA_NET_SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")


def _delta_net(section: Section) -> GatedDeltaNet:
    sizes = [section.integer(f"linear_{name}") for name in _DELTA_NET_SIZES]
    mixer = GatedDeltaNet(section.integer("hidden_size"), *sizes)
    if mixer.value_heads % mixer.key_heads:
        raise section.error("linear_num_value_heads", f"no multiple of linear_num_key_heads {mixer.key_heads}")
    return mixer


def _qwen_window(section: Section) -> int | None:
    """Qwen's `sliding_window` means nothing unless `use_sliding_window` is set."""
    section.ignore("sliding_window")
    switched_on = section.boolean("use_sliding_window", False)
    if not switched_on or not (section.has("sliding_window") or section.lacks("sliding_window")):
        return None
    return section.integer("sliding_window", 4096)


def _same_window(section: Section, window: int | None) -> Mixers:
    _check_fixed_pattern(section, "full_attention" if window is None else "sliding_attention")
    return (_attention(section, window=window),) * layer_count(section)


def _by_layer_types(section: Section, default: list[str], known: dict[str, Mixer]) -> Mixers:
    names = section.items("layer_types") or default
    if len(names) != len(default):
        raise section.error("layer_types", f"{len(names)} entries for {len(default)} layers (num_hidden_layers)")
    strangers = sorted({str(name) for name in names} - set(known))
    if strangers:
        raise section.error("layer_types", f"{strangers} cannot be counted; this configuration knows {sorted(known)}")
    return tuple(known[name] for name in names)


def _check_fixed_pattern(section: Section, only: str) -> None:
    """Model code that ignores `layer_types` must not be given a list that says something else."""
    if set(section.items("layer_types")) - {only}:
        raise section.error("layer_types", f"this model type makes every layer {only}")
