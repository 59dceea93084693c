"""What a model is, in one frozen value that every other module of the room reads.

A `ModelDescription` holds sizes and choices under their usual names and nothing about Hugging Face's or Megatron's
spelling; `rlpipe.model.families` makes it from a `config.json`.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

LayerKind = Literal["full_attention", "linear_attention"]

_STORAGE = {"hf_config", "weight_prefix", "fused_experts", "fused_mtp_experts", "mtp_layers", "max_positions"}


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of Llama 3 ("llama3" in Hugging Face's `rope_parameters`)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first `dimensions` channels of each head."""

    theta: float
    dimensions: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class GatedDeltaNetSizes:
    """Heads and widths of the linear attention layers; `value_heads` is a multiple of `key_heads`.

    `fused_projections` tells how the checkpoint stores the input projections: Qwen3-Next interleaves q, k, v, z (and
    b, a) per key head in two matrices, Qwen3.5 has four matrices.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    fused_projections: bool


@dataclass(frozen=True)
class ExpertSizes:
    """Routed experts; `shared_width` is 0 without a shared expert (which is always gated in these models)."""

    experts: int
    top_k: int
    width: int
    shared_width: int
    normalize_top_k: bool


@dataclass(frozen=True)
class ModelDescription:
    """A decoder-only language model. All sizes are global (not per rank).

    layer_kinds, expert_layers: one entry per decoder layer; `expert_layers[i]` says that layer i has routed experts
    instead of one MLP of width `mlp_width`. Layers of the multi-token-prediction head (`mtp_layers` of them) use full
    attention and experts if the model has any.
    weight_prefix: what stands before "layers.0..." in the checkpoint, "model." or "model.language_model.".
    fused_experts, fused_mtp_experts: the checkpoint stores the experts of a layer (of the multi-token-prediction
        layer) as two stacked tensors, not one set per expert.
    hf_config: the raw config.json, kept to be written out again.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    layer_kinds: tuple[LayerKind, ...]
    expert_layers: tuple[bool, ...]
    norm_epsilon: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    attention_output_gate: bool
    zero_centered_norm: bool
    gated_delta_net: GatedDeltaNetSizes | None
    experts: ExpertSizes | None
    mtp_layers: int
    weight_prefix: str
    max_positions: int
    fused_experts: bool
    fused_mtp_experts: bool
    hf_config: dict[str, Any]

    @property
    def layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def maths(self) -> dict[str, Any]:
        """Everything that the forward pass depends on, by field; how a folder stores it is left out."""
        return {name: value for name, value in asdict(self).items() if name not in _STORAGE}
