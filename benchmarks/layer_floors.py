"""How long the actor's layers must take at least: products at the speed of a large one, and what lies between them at
the speed at which the device copies.

Traffic counts tensors between products once for each kernel that a stretch cannot do without: a norm with the residual
sum before it, the convolution with what follows it, SwiGLU, the spreading and the sum of tokens of experts.
"""

from dataclasses import dataclass

from rlpipe.flops import Part, model_flops
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


@dataclass(frozen=True)
class Floors:
    """Seconds of a forward and backward pass, by kind as in `kernel_groups`; `between` is all that is no product."""

    dense: float
    grouped: float
    attention: float
    delta_rule: float
    between: float

    @property
    def total(self) -> float:
        return self.dense + self.grouped + self.attention + self.delta_rule + self.between

    def line(self) -> str:
        parts = (
            ("dense GEMM", self.dense),
            ("grouped GEMM", self.grouped),
            ("softmax attention", self.attention),
            ("Gated DeltaNet", self.delta_rule),
            ("between products", self.between),
        )
        shown = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in parts)
        return f"  floors, ms: {shown}; together {self.total * 1e3:.1f}"


def layer_floors(shape: ModelShape, lengths: tuple[int, ...], product_flops: float, copy_bytes: float) -> Floors:
    """product_flops: a second, of a large matrix product; copy_bytes: a second, read and written together."""
    parts = {part: work for part, work in model_flops(shape, lengths).parts if part is not Part.HEAD}
    parts_of_layers = (layer.feed_forward for layer in shape.layers)
    routed = sum(part.routed_flops for part in parts_of_layers if isinstance(part, MixtureOfExperts)) * sum(lengths)
    weights = sum(work.weights for work in parts.values())
    delta_rule = parts[Part.GDN].core if Part.GDN in parts else 0
    cores = sum(work.core for work in parts.values())
    elements = sum(_elements_between(layer, shape.hidden_size) for layer in shape.layers) * sum(lengths)
    return Floors(
        dense=3 * (weights - routed) / product_flops,
        grouped=3 * routed / product_flops,
        attention=3 * (cores - delta_rule) / product_flops,
        delta_rule=3 * delta_rule / product_flops,
        between=2 * elements / copy_bytes,
    )


def _elements_between(layer: DecoderLayer, hidden: int) -> int:
    """Elements that one token reads and writes between products, forward and backward."""
    norms = 2 * (4 + 4) * hidden
    return norms + _mixer_elements(layer.mixer) + _feed_forward_elements(layer.feed_forward, hidden)


def _mixer_elements(mixer: Mixer) -> int:
    if isinstance(mixer, GatedDeltaNet):
        values = mixer.value_heads * mixer.value_head_dim
        convolved = 2 * mixer.key_heads * mixer.key_head_dim + values
        return (2 + 3) * convolved + (3 + 5) * values
    if isinstance(mixer, LatentAttention):
        raise TypeError("the actor has no layers with latent attention")
    query, key = mixer.heads * mixer.head_dim, mixer.key_value_heads * mixer.head_dim
    return (2 + 3) * (query + key) + ((3 + 5) * query if mixer.output_gate else 0)


def _feed_forward_elements(part: FeedForward, hidden: int) -> int:
    if isinstance(part, DenseFeedForward):
        return (3 + 5) * part.intermediate_size
    widths = part.experts_per_token * part.expert_intermediate_size + part.shared_intermediate_size
    shared = (1 + 2) * hidden if part.shared_intermediate_size else 0
    return (3 + 5) * widths + 4 * (part.experts_per_token + 1) * hidden + shared
