"""FLOPs that frozen weights save: the products that would make their gradients."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import prod

from rlpipe.flops.layers import MixtureOfExperts
from rlpipe.flops.shape import ModelShape

_ROUTED = ".experts."
_EMBEDDING = "embed_tokens.weight"


def weight_gradient_flops(shape: ModelShape, weights: Iterable[tuple[str, Sequence[int]]], *, tied: bool) -> int:
    """Of one token, for weights of the decoder and the head: Hugging Face name and shape.

    A matrix's gradient is one product: 2 FLOPs for each element, and for a routed expert's only where a token reaches
    it. Norms and biases have none. Gradients of inputs are another matter: below the lowest trained layer they are not
    needed either, which nothing here takes into account.

    tied: the embedding is also the head; otherwise it is a lookup.
    """
    total = Fraction(0)
    for name, size in weights:
        if len(size) < 2 or (name.endswith(_EMBEDDING) and not tied):
            continue
        total += 2 * prod(size) * (_reached_share(shape) if _ROUTED in name else 1)
    return int(total)


def _reached_share(shape: ModelShape) -> Fraction:
    experts = next(layer.feed_forward for layer in shape.layers if isinstance(layer.feed_forward, MixtureOfExperts))
    return Fraction(experts.experts_per_token, experts.experts)
