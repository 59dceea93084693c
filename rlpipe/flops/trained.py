"""FLOPs that frozen weights save: the products that would make their gradients, and those of the inputs below all that
is trained."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from rlpipe.flops.breakdown import feed_forward_flops, mixer_flops
from rlpipe.flops.convention import Convention
from rlpipe.flops.layers import DecoderLayer, MixtureOfExperts
from rlpipe.flops.shape import ModelShape

_ROUTED = ".experts."
_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class UntrainedWork:
    """What is left of training everything where not all is trained.

    token_flops: for each token, products for gradients of frozen weights, less those that adapters add. idle_layers:
    decoder layers below the lowest trained one, through which no gradient passes.
    """

    token_flops: int = 0
    idle_layers: tuple[DecoderLayer, ...] = ()

    def flops(self, lengths: Iterable[int], idle: bool = True) -> int:
        """Saved over sequences of `lengths` tokens. idle: whether gradients do stop above `idle_layers`."""
        lengths = tuple(lengths)
        tokens = sum(lengths)
        saved = self.token_flops * tokens
        for layer in self.idle_layers if idle else ():
            mixer = mixer_flops(layer, lengths, Convention.CAUSAL_HALF)
            saved += mixer.weights + 2 * mixer.core + feed_forward_flops(layer, tokens).weights
        return saved


def idle_layers(shape: ModelShape, first_trained: int | None) -> tuple[DecoderLayer, ...]:
    """The layers below `first_trained`; all where None of them is trained."""
    return shape.layers[:first_trained]


def weight_flops(shape: ModelShape, name: str, elements: int) -> Fraction:
    """Of one token through one product with `elements` of a weight; of routed experts where a token reaches them."""
    return 2 * elements * (_reached_share(shape) if _ROUTED in name else Fraction(1))


def weight_gradient_flops(shape: ModelShape, weights: Iterable[tuple[str, Sequence[int]]], *, tied: bool) -> int:
    """Of one token, for weights of the decoder and the head: Hugging Face name and shape.

    A matrix's gradient is one product: 2 FLOPs for each element, and for a routed expert's only where a token reaches
    it. Norms and biases have none.

    tied: the embedding is also the head; otherwise it is a lookup.
    """
    products = (one for one in weights if len(one[1]) > 1 and (tied or not one[0].endswith(_EMBEDDING)))
    return int(sum(weight_flops(shape, name, prod(size)) for name, size in products))


def _reached_share(shape: ModelShape) -> Fraction:
    experts = next(layer.feed_forward for layer in shape.layers if isinstance(layer.feed_forward, MixtureOfExperts))
    return Fraction(experts.experts_per_token, experts.experts)
