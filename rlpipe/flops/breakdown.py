"""Model FLOPs of a batch from the real lengths of its sequences, and the cost of one sequence for balancing."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from rlpipe.flops.convention import Convention, doubled_pairs
from rlpipe.flops.layers import DecoderLayer, DenseFeedForward, GatedDeltaNet
from rlpipe.flops.shape import ModelShape
from rlpipe.flops.vision import Grid


class Part(StrEnum):
    """Kinds of work. Attention and Gated DeltaNet layers give their feed-forward half to `dense` or `moe`."""

    FULL_ATTENTION = "full_attention"
    SLIDING_ATTENTION = "sliding_attention"
    GDN = "gdn"
    DENSE = "dense"
    MOE = "moe"
    MTP = "mtp"
    HEAD = "head"
    VISION = "vision"


class Frozen(StrEnum):
    """How a part that is not trained takes part in the backward pass."""

    GRADIENTS_PASS = "gradients_pass"  # something before it is trained: no gradients of its weights, but of its input
    NO_GRADIENTS = "no_gradients"  # nothing before it is trained, as in a frozen vision tower


@dataclass(frozen=True)
class PartFlops:
    """Forward FLOPs of one part: products with weights, and the parameter-free core (softmax attention, delta rule)."""

    weights: int
    core: int = 0

    @property
    def forward(self) -> int:
        return self.weights + self.core

    def train(self, frozen: Frozen | None = None) -> int:
        """A backward pass costs each product twice: once for its input, once for its weights (for a core: its inputs).

        Frozen weights save the second of the two; a core has no weights to freeze.
        """
        if frozen is Frozen.NO_GRADIENTS:
            return self.forward
        if frozen is Frozen.GRADIENTS_PASS:
            return 2 * self.weights + 3 * self.core
        return 3 * self.forward

    def __add__(self, other: "PartFlops") -> "PartFlops":
        return PartFlops(self.weights + other.weights, self.core + other.core)

    def __mul__(self, count: int) -> "PartFlops":
        return PartFlops(self.weights * count, self.core * count)


@dataclass(frozen=True)
class FlopsBreakdown:
    """Model FLOPs of some sequences by part. Add the breakdowns of micro-batches or data-parallel ranks with `+`.

    tokens: the real tokens of the sequences. parts: those that the model has, in `Part`'s order.
    """

    convention: Convention
    tokens: int
    parts: tuple[tuple[Part, PartFlops], ...]

    @property
    def per_layer_type(self) -> dict[str, int]:
        """Forward FLOPs by name of the part; their sum is `forward`."""
        return {part.value: flops.forward for part, flops in self.parts}

    @property
    def forward(self) -> int:
        return sum(flops.forward for _, flops in self.parts)

    @property
    def train(self) -> int:
        """Forward and backward with everything trained: three times the forward pass."""
        return self.train_with_frozen({})

    @property
    def logprob(self) -> int:
        """A pass for log-probabilities: one forward, without the MTP layers, whose predictions it does not need."""
        return sum(flops.forward for part, flops in self.parts if part is not Part.MTP)

    def train_with_frozen(self, frozen: Mapping[Part, Frozen]) -> int:
        """Forward and backward when the parts in `frozen` are not trained."""
        return sum(flops.train(frozen.get(part)) for part, flops in self.parts)

    def __add__(self, other: Self) -> "FlopsBreakdown":
        if self.convention is not other.convention:
            raise ValueError(f"cannot add FLOPs counted as {self.convention} and as {other.convention}")
        return _breakdown(self.convention, self.tokens + other.tokens, [*self.parts, *other.parts])


def model_flops(
    shape: ModelShape,
    lengths: Iterable[int],
    convention: Convention = Convention.CAUSAL_HALF,
    *,
    include_mtp: bool = True,
    grids: Iterable[Grid] = (),
) -> FlopsBreakdown:
    """Model FLOPs of sequences with the real `lengths` (tokens), and of the images and videos `grids` (patches).

    Give the sequences of the whole batch, or of each data-parallel rank once and add: how tensor, pipeline, context
    and expert parallelism split the work changes nothing. `include_mtp=False` leaves out MTP layers that a config
    lists but the run does not train. ValueError for a negative length or for grids of a model without vision tower.
    """
    lengths, grids = tuple(lengths), tuple(Grid(*grid) for grid in grids)
    if any(length < 0 for length in lengths):
        raise ValueError(f"a sequence of {min(lengths)} tokens")
    tokens = sum(lengths)
    work = [
        (part, flops * count)
        for layer, count in shape.layer_kinds
        for part, flops in _layer_work(layer, lengths, convention)
    ]
    work.append((Part.HEAD, PartFlops(shape.head_flops * tokens)))
    if include_mtp:
        work += [(Part.MTP, flops) for flops in _mtp_work(shape, lengths, convention)]
    work += [(Part.VISION, flops) for flops in _vision_work(shape, grids)]
    return _breakdown(convention, tokens, work)


@dataclass(frozen=True)
class SequenceCost:
    """Forward FLOPs of one sequence: `linear * s + quadratic * s^2`, plus `windowed` terms if the model has windows.

    windowed: pairs (window in tokens, FLOPs for each doubled pair).
    """

    convention: Convention
    linear: int
    quadratic: int
    windowed: tuple[tuple[int, int], ...] = ()

    def __call__(self, length: int) -> int:
        """Forward FLOPs of a sequence of `length` tokens."""
        windows = sum(flops * doubled_pairs(length, self.convention, window) for window, flops in self.windowed)
        return self.linear * length + self.quadratic * length**2 + windows


def sequence_cost(
    shape: ModelShape, convention: Convention = Convention.CAUSAL_HALF, *, include_mtp: bool = True
) -> SequenceCost:
    """The cost that balances packs and ranks: exactly `model_flops(...).forward` of a single sequence."""
    layers = shape.layers + (shape.mtp_decoder_layers if include_mtp else ())
    mtp_extra = shape.mtp_layers * (shape.mtp_projection_flops + shape.head_flops) if include_mtp else 0
    linear, quadratic = shape.head_flops + mtp_extra, 0
    windowed: dict[int, int] = defaultdict(int)
    for mixer in (layer.mixer for layer in layers):
        linear += mixer.weights_flops
        if isinstance(mixer, GatedDeltaNet):
            linear += mixer.core_flops
        elif mixer.window is not None:
            windowed[mixer.window] += mixer.core_flops_per_doubled_pair
        else:
            quadratic += mixer.core_flops_per_doubled_pair * (2 if convention is Convention.FULL else 1)
            linear += mixer.core_flops_per_doubled_pair if convention is Convention.CAUSAL_EXACT else 0
    linear += sum(layer.feed_forward.weights_flops for layer in layers)
    return SequenceCost(convention, linear, quadratic, tuple(sorted(windowed.items())))


def mixer_flops(layer: DecoderLayer, lengths: tuple[int, ...], convention: Convention) -> PartFlops:
    """Forward FLOPs of a layer's token mixer over sequences of `lengths` tokens."""
    mixer, tokens = layer.mixer, sum(lengths)
    if isinstance(mixer, GatedDeltaNet):
        return PartFlops(mixer.weights_flops * tokens, mixer.core_flops * tokens)
    pairs = sum(doubled_pairs(length, convention, mixer.window) for length in lengths)
    return PartFlops(mixer.weights_flops * tokens, mixer.core_flops_per_doubled_pair * pairs)


def feed_forward_flops(layer: DecoderLayer, tokens: int) -> PartFlops:
    return PartFlops(layer.feed_forward.weights_flops * tokens)


def _layer_work(layer: DecoderLayer, lengths: tuple[int, ...], convention: Convention) -> list[tuple[Part, PartFlops]]:
    if isinstance(layer.mixer, GatedDeltaNet):
        mixer_part = Part.GDN
    else:
        mixer_part = Part.FULL_ATTENTION if layer.mixer.window is None else Part.SLIDING_ATTENTION
    feed_forward_part = Part.DENSE if isinstance(layer.feed_forward, DenseFeedForward) else Part.MOE
    return [
        (mixer_part, mixer_flops(layer, lengths, convention)),
        (feed_forward_part, feed_forward_flops(layer, sum(lengths))),
    ]


def _mtp_work(shape: ModelShape, lengths: tuple[int, ...], convention: Convention) -> list[PartFlops]:
    extra = PartFlops((shape.mtp_projection_flops + shape.head_flops) * sum(lengths))
    layers = shape.mtp_decoder_layers
    return [flops for layer in layers for _, flops in (*_layer_work(layer, lengths, convention), (Part.MTP, extra))]


def _vision_work(shape: ModelShape, grids: tuple[Grid, ...]) -> list[PartFlops]:
    if not grids:
        return []
    tower = shape.vision
    if tower is None:
        raise ValueError(f"{len(grids)} images or videos for a {shape.model_type} model without a vision tower")
    return [PartFlops(tower.weights_flops(grid), tower.attention_core_flops(grid)) for grid in grids]


def _breakdown(convention: Convention, tokens: int, work: Iterable[tuple[Part, PartFlops]]) -> FlopsBreakdown:
    """Adds up equal parts and leaves out the ones that the model does not have."""
    sums: dict[Part, PartFlops] = {}
    for part, flops in work:
        sums[part] = sums.get(part, PartFlops(0)) + flops
    return FlopsBreakdown(convention, tokens, tuple((part, sums[part]) for part in Part if part in sums))
