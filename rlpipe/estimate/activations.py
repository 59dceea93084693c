"""Bytes that the actor keeps between forward and backward pass, and those it works with when most is kept.

Counted from what the layers of `actor/` save, tensor by tensor: `tests/plan` compares it with what autograd keeps.
`t` is the tokens of a rank: the pack divided by CP, or by CP x TP between the layers under sequence parallelism. Ranks
that share experts are taken to get equally many rows.
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
    MixtureOfExperts,
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


@dataclass(frozen=True)
class Passes:
    """How layers compute.

    fused: on a GPU in bfloat16, stretches between matrix products are one kernel that keeps its inputs only, and
    softmax attention and Gated DeltaNet have kernels of their own. trained: whether the model's own weights have
    gradients, and not adapters alone. trained_experts: whether routed experts or adapters beside them have. Inputs of
    what has none are not kept.
    """

    actor: ActorConfig
    element_bytes: int
    fused: bool
    trained: bool = True
    trained_experts: bool = True


def kept_bytes(shape: ModelShape, passes: Passes) -> int:
    """Of all layers of a stage; with full recompute only the layers' inputs."""
    actor = passes.actor
    stage = shape.layers[: len(shape.layers) // actor.parallel.pipeline]
    if actor.recompute.chosen == "full":
        kept = len(stage) * tokens_of(actor).between * shape.hidden_size * passes.element_bytes
    else:
        kept = sum(layer_bytes(layer, shape.hidden_size, passes) for layer in stage)
    return actor.parallel.pipeline * kept  # packs whose backward pass has not come yet, first stage of 1F1B


def recomputed_bytes(shape: ModelShape, passes: Passes) -> int:
    """The largest layer while the backward pass computes it again; 0 without full recompute."""
    if passes.actor.recompute.chosen != "full":
        return 0
    return max(layer_bytes(layer, shape.hidden_size, passes) for layer in shape.layers)


def working_bytes(shape: ModelShape, passes: Passes) -> int:
    """What a feed-forward has in hand beyond what is kept, which is most when it is the last layer's: nothing that
    earlier layers keep is free yet. The larger of its two passes."""
    tokens = tokens_of(passes.actor)
    last = shape.layers[-1].feed_forward
    if isinstance(last, DenseFeedForward):
        elements = _dense_working_elements(last, shape.hidden_size, tokens, passes)
    else:
        elements = _experts_working_elements(last, shape.hidden_size, tokens, passes)
    return elements * passes.element_bytes


def _dense_working_elements(part: DenseFeedForward, hidden_size: int, tokens: Tokens, passes: Passes) -> int:
    """Backward: gradients of both sides of the activation, or of those of the first projection and of its weight."""
    width = part.intermediate_size // passes.actor.parallel.tensor
    weight = 2 * width * hidden_size if passes.trained else 0
    return max(3 * width * tokens.inside, 2 * width * tokens.inside + hidden_size * tokens.between + weight)


def _experts_working_elements(part: MixtureOfExperts, hidden_size: int, tokens: Tokens, passes: Passes) -> int:
    """Backward: gradients of both sides of the first projection's rows and of its weights.

    Where ranks share experts, every move between ranks, and between the order of ranks and that of experts, makes new
    rows: at the end of the forward pass those before and after they were sent (`ExpertsLayer._output` names them until
    it returns), the experts' output and its copy in the ranks' order; backward two of them at a time.
    """
    ranks, width = passes.actor.parallel.expert, part.expert_intermediate_size
    routed = part.experts_per_token * tokens.between
    weights = part.experts // ranks * 2 * width * hidden_size if passes.trained_experts else 0
    backward = routed * (2 * width + hidden_size) + weights
    moved = routed * hidden_size
    return max(backward, 4 * moved) if ranks > 1 else backward


def layer_bytes(layer: DecoderLayer, hidden_size: int, passes: Passes) -> int:
    """Everything that one layer keeps: inputs and outputs of its two norms, its mixer and its feed-forward."""
    actor = passes.actor
    tokens = tokens_of(actor)
    norms = 4 * tokens.between * hidden_size
    mixer = _mixer_elements(layer.mixer, passes) // actor.parallel.tensor * tokens.inside
    kept = (norms + mixer) * passes.element_bytes
    return kept + _feed_forward_bytes(layer.feed_forward, hidden_size, tokens, passes)


def _mixer_elements(mixer: Mixer, passes: Passes) -> int:
    """Elements for each token, before division over tensor ranks."""
    if isinstance(mixer, GatedDeltaNet):
        return _gdn_elements(mixer, passes.fused and passes.actor.gdn_backend != "torch", passes.trained)
    if isinstance(mixer, LatentAttention):
        return mixer.heads * (4 * mixer.query_head_dim + 3 * mixer.value_head_dim)
    query, key_value = mixer.heads * mixer.head_dim, mixer.key_value_heads * mixer.head_dim
    gate = 2 * query if mixer.output_gate else 0
    return gate + (3 * query + 3 * key_value if passes.fused else 8 * query + 5 * key_value)


def _gdn_elements(mixer: GatedDeltaNet, fused: bool, trained: bool) -> int:
    """Fused kernels keep their inputs and one matrix per chunk, the gated norm after them its input and output; plain
    torch keeps every step of the rule, and what each weight of a trained convolution was multiplied with."""
    keys, values = mixer.key_heads * mixer.key_head_dim, mixer.value_heads * mixer.value_head_dim
    projected, chunk = 2 * keys + 2 * values, mixer.value_heads * _GDN_CHUNK_TOKENS
    if fused:
        return projected + 2 * keys + 3 * values + chunk
    convolved = mixer.conv_width * (2 * keys + values) if trained else 0
    return projected + convolved + 6 * keys + 12 * values + 10 * chunk


def _feed_forward_bytes(part: FeedForward, hidden_size: int, tokens: Tokens, passes: Passes) -> int:
    tensor, fused = passes.actor.parallel.tensor, passes.fused
    gated = 3 if fused else 4  # gate and up, their product, and without fusion silu(gate)
    if isinstance(part, DenseFeedForward):
        return gated * part.intermediate_size // tensor * tokens.inside * passes.element_bytes
    kept, inputs = (3 if fused else 5), hidden_size
    if not passes.trained_experts:  # neither the rows nor the product of gate and up
        kept, inputs = kept - 1, 0
    routed = part.experts_per_token * (inputs + kept * part.expert_intermediate_size) * tokens.between
    routed += 2 * hidden_size * tokens.between
    shared = gated * part.shared_intermediate_size // tensor * tokens.inside
    router = 3 * part.experts * tokens.between * _FLOAT32
    return (routed + shared) * passes.element_bytes + router
