"""Bytes that the actor keeps between forward and backward pass.

Counted from what the layers of `actor/` save, tensor by tensor: `tests/plan` compares it with what autograd keeps.
`fused`: on a GPU in bfloat16, stretches between matrix products are one kernel that keeps its inputs only, and softmax
attention and Gated DeltaNet have kernels of their own.
`t` is the tokens of a rank: the pack divided by CP, or by CP x TP between the layers under sequence parallelism.
"""

from dataclasses import dataclass

from rlpipe.config.actor import ActorConfig
from rlpipe.flops.layers import (
    DecoderLayer,
    DenseFeedForward,
    FeedForward,
    GatedDeltaNet,
    LatentAttention,
    Mixer,
)
from rlpipe.flops.shape import ModelShape

_FLOAT32 = 4
_GDN_CHUNK_TOKENS = 64


@dataclass(frozen=True)
class Tokens:
    """Tokens of a rank's part of a pack: inside layers, and between them."""

    inside: int
    between: int


def tokens_of(actor: ActorConfig) -> Tokens:
    """Of a full pack. Context parallelism cuts it; between layers, sequence parallelism does too."""
    inside = actor.pack_tokens
    return Tokens(inside, inside // actor.parallel.tensor if actor.parallel.sequence else inside)


def kept_bytes(shape: ModelShape, actor: ActorConfig, element_bytes: int, fused: bool) -> int:
    """Of all layers of a stage; with full recompute only the layers' inputs."""
    stage = shape.layers[: len(shape.layers) // actor.parallel.pipeline]
    if actor.recompute.chosen == "full":
        kept = len(stage) * tokens_of(actor).between * shape.hidden_size * element_bytes
    else:
        kept = sum(layer_bytes(layer, shape.hidden_size, actor, element_bytes, fused) for layer in stage)
    return actor.parallel.pipeline * kept  # packs whose backward pass has not come yet, first stage of 1F1B


def recomputed_bytes(shape: ModelShape, actor: ActorConfig, element_bytes: int, fused: bool) -> int:
    """The largest layer while the backward pass computes it again; 0 without full recompute."""
    if actor.recompute.chosen != "full":
        return 0
    return max(layer_bytes(layer, shape.hidden_size, actor, element_bytes, fused) for layer in shape.layers)


def layer_bytes(layer: DecoderLayer, hidden_size: int, actor: ActorConfig, element_bytes: int, fused: bool) -> int:
    """Everything that one layer keeps: inputs and outputs of its two norms, its mixer and its feed-forward."""
    tokens = tokens_of(actor)
    norms = 4 * tokens.between * hidden_size * element_bytes
    mixer = _mixer_elements(layer.mixer, actor, fused) // actor.parallel.tensor * tokens.inside * element_bytes
    return norms + mixer + _feed_forward_bytes(layer.feed_forward, hidden_size, tokens, actor, element_bytes, fused)


def _mixer_elements(mixer: Mixer, actor: ActorConfig, fused: bool) -> int:
    """Elements for each token, before division over tensor ranks."""
    if isinstance(mixer, GatedDeltaNet):
        return _gdn_elements(mixer, fused=fused and actor.gdn_backend != "torch")
    if isinstance(mixer, LatentAttention):
        return mixer.heads * (4 * mixer.query_head_dim + 3 * mixer.value_head_dim)
    query, key_value = mixer.heads * mixer.head_dim, mixer.key_value_heads * mixer.head_dim
    gate = 2 * query if mixer.output_gate else 0
    return gate + (4 * query + 3 * key_value if fused else 8 * query + 5 * key_value)


def _gdn_elements(mixer: GatedDeltaNet, fused: bool) -> int:
    """Fused kernels keep their inputs and one matrix per chunk, the gated norm after them its input and output; plain
    torch keeps every step of the rule."""
    keys, values = mixer.key_heads * mixer.key_head_dim, mixer.value_heads * mixer.value_head_dim
    projected, chunk = 2 * keys + 2 * values, mixer.value_heads * _GDN_CHUNK_TOKENS
    if fused:
        return projected + 2 * keys + 3 * values + chunk
    return projected + mixer.conv_width * (2 * keys + values) + 6 * keys + 12 * values + 10 * chunk


def _feed_forward_bytes(
    part: FeedForward, hidden_size: int, tokens: Tokens, actor: ActorConfig, element_bytes: int, fused: bool
) -> int:
    gated = 3 if fused else 4  # gate and up, their product, and without fusion silu(gate)
    if isinstance(part, DenseFeedForward):
        return gated * part.intermediate_size // actor.parallel.tensor * tokens.inside * element_bytes
    kept = 3 if fused else 5
    routed = part.experts_per_token * (hidden_size + kept * part.expert_intermediate_size) * tokens.between
    routed += 2 * hidden_size * tokens.between
    shared = gated * part.shared_intermediate_size // actor.parallel.tensor * tokens.inside
    router = 3 * part.experts * tokens.between * _FLOAT32
    return (routed + shared) * element_bytes + router
