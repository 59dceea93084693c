"""What a model is, in one frozen value that everything else reads instead of its config.json.

It holds sizes and choices under their usual names and nothing about Hugging Face's or Megatron's spelling;
`rlpipe.model.model_reader` makes it.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rlpipe.flops.layers import (
    DecoderLayer,
    DenseFeedForward,
    GatedDeltaNet,
    GroupedQueryAttention,
    LatentAttention,
    Mixer,
    MixtureOfExperts,
)
from rlpipe.flops.shape import ModelShape
from rlpipe.flops.vision import VisionTower

LayerKind = Literal["full_attention", "sliding_attention", "linear_attention"]

_NO_MATHS = {
    *("model_type", "max_positions", "end_tokens", "mtp_layers", "vision"),
    *("weight_prefix", "fused_experts", "fused_mtp_experts"),
}


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
class LatentAttentionSizes:
    """Widths of multi-head latent attention; `query_rank` is None where queries are not compressed."""

    query_rank: int | None
    key_value_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int


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
    """Routed experts; `shared_width` is 0 without a shared expert, and `shared_gate` tells whether one is gated."""

    experts: int
    top_k: int
    width: int
    shared_width: int
    shared_gate: bool


@dataclass(frozen=True, kw_only=True)
class MixerSizes:
    """The token mixers: the kind of each decoder layer, and the sizes of each kind.

    window: keys that a query of a "sliding_attention" layer sees, itself included.
    latent_attention, gated_delta_net: of the "full_attention" and the "linear_attention" layers where they are such.
    """

    layer_kinds: tuple[LayerKind, ...]
    heads: int
    kv_heads: int
    head_dim: int
    attention_output_gate: bool = False
    window: int | None = None
    latent_attention: LatentAttentionSizes | None = None
    gated_delta_net: GatedDeltaNetSizes | None = None


@dataclass(frozen=True, kw_only=True)
class FeedForwardSizes:
    """The feed-forward parts: `expert_layers[i]` says that decoder layer i has routed experts instead of one MLP of
    width `mlp_width`. That is 0 where the file has none because no layer needs it."""

    mlp_width: int
    expert_layers: tuple[bool, ...]
    experts: ExpertSizes | None = None


@dataclass(frozen=True, kw_only=True)
class ModelDescription(MixerSizes, FeedForwardSizes):
    """A decoder-only language model of any family that rlpipe knows. All sizes are global (not per rank).

    model_type: of the decoder. architecture: the class that the file names, "" where it names none.
    mtp_layers: layers of the multi-token-prediction head. They use full attention, and experts if the model has any.
    max_positions: longest sequence that the model is made for; None where the file does not say.
    end_tokens: token ids that end a response; a generation_config.json may name more.
    """

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    tied_embeddings: bool
    max_positions: int | None
    end_tokens: frozenset[int]
    mtp_layers: int
    vision: VisionTower | None

    @property
    def layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def shape(self) -> ModelShape:
        """As far as FLOPs depend on it."""
        mixers = {kind: self._mixer(kind) for kind in set(self.layer_kinds)}
        feed_forwards = {experts: self._feed_forward(experts) for experts in set(self.expert_layers)}
        pairs = zip(self.layer_kinds, self.expert_layers, strict=True)
        return ModelShape(
            model_type=self.model_type,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            layers=tuple(DecoderLayer(mixers[kind], feed_forwards[experts]) for kind, experts in pairs),
            mtp_layers=self.mtp_layers,
            vision=self.vision,
        )

    def _mixer(self, kind: LayerKind) -> Mixer:
        latent, delta = self.latent_attention, self.gated_delta_net
        if kind == "linear_attention":
            assert delta is not None
            return GatedDeltaNet(
                hidden_size=self.hidden_size,
                key_heads=delta.key_heads,
                value_heads=delta.value_heads,
                key_head_dim=delta.key_dim,
                value_head_dim=delta.value_dim,
                conv_width=delta.conv_width,
            )
        if latent is not None:
            return LatentAttention(hidden_size=self.hidden_size, heads=self.heads, **asdict(latent))
        return GroupedQueryAttention(
            hidden_size=self.hidden_size,
            heads=self.heads,
            key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            output_gate=self.attention_output_gate,
            window=self.window if kind == "sliding_attention" else None,
        )

    def _feed_forward(self, has_experts: bool) -> DenseFeedForward | MixtureOfExperts:
        if not has_experts:
            return DenseFeedForward(self.hidden_size, self.mlp_width)
        assert self.experts is not None
        return MixtureOfExperts(
            hidden_size=self.hidden_size,
            experts=self.experts.experts,
            experts_per_token=self.experts.top_k,
            expert_intermediate_size=self.experts.width,
            shared_intermediate_size=self.experts.shared_width,
            shared_gate=self.experts.shared_gate,
        )


@dataclass(frozen=True, kw_only=True)
class TrainableModel(ModelDescription):
    """A model that the actor can train: its family is built there, and every key of its config.json is understood.

    normalize_top_k: whether the weights of a token's chosen experts are made to sum to 1.
    weight_prefix: what stands before "layers.0..." in the checkpoint, "model." or "model.language_model.".
    fused_experts, fused_mtp_experts: the checkpoint stores the experts of a layer (of the multi-token-prediction
        layer) as two stacked tensors, not one set per expert.
    """

    max_positions: int
    norm_epsilon: float
    zero_centered_norm: bool
    rope: Rope
    qkv_bias: bool
    qk_norm: bool
    normalize_top_k: bool
    weight_prefix: str
    fused_experts: bool
    fused_mtp_experts: bool

    @property
    def maths(self) -> dict[str, Any]:
        """Everything that the forward pass depends on, by field; how a folder stores it is left out."""
        return {name: value for name, value in asdict(self).items() if name not in _NO_MATHS}
