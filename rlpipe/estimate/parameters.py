"""How many parameters a rank holds, from the shape of the model and the parallel layout."""

import math
from dataclasses import dataclass

from rlpipe.config.actor import ParallelConfig
from rlpipe.flops.layers import DecoderLayer, GatedDeltaNet, GroupedQueryAttention, LatentAttention, MixtureOfExperts
from rlpipe.flops.shape import ModelShape

_VOCABULARY_MULTIPLE = 8


@dataclass(frozen=True)
class Parameters:
    """Counts of some layers by how they are divided.

    tensor: over tensor-parallel ranks (mixers, dense and shared feed-forwards, embedding, head).
    experts: over expert-parallel ranks. whole: on every rank (norms, routers, gates).
    """

    tensor: int = 0
    experts: int = 0
    whole: int = 0

    @property
    def total(self) -> int:
        return self.tensor + self.experts + self.whole

    def on_rank(self, parallel: ParallelConfig) -> int:
        return math.ceil(self.tensor / parallel.tensor) + math.ceil(self.experts / parallel.expert) + self.whole

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(self.tensor + other.tensor, self.experts + other.experts, self.whole + other.whole)

    def __mul__(self, count: int) -> "Parameters":
        return Parameters(self.tensor * count, self.experts * count, self.whole * count)


def model_parameters(shape: ModelShape, tied: bool) -> Parameters:
    """Of the whole decoder with embedding and head, without multi-token-prediction layers and vision tower."""
    layers = sum(
        (layer_parameters(layer, shape.hidden_size) * count for layer, count in shape.layer_kinds), Parameters()
    )
    return layers + embedding_parameters(shape) + (Parameters() if tied else embedding_parameters(shape))


def prediction_parameters(shape: ModelShape) -> Parameters:
    """Of one multi-token-prediction layer: a layer like the last one, a projection of twice the width, three norms."""
    hidden = shape.hidden_size
    return layer_parameters(shape.layers[-1], hidden) + Parameters(tensor=2 * hidden**2, whole=3 * hidden)


def fp8_parameters(shape: ModelShape, quantization: str) -> int:
    """Of the decoder's, those that an engine keeps in 8 bits: experts, or also projections of softmax attention and all
    other feed-forward parts but routers and gates.

    quantization: `rollout.engine.quantization`.
    """
    experts = others = 0
    for layer in shape.layers:
        mixer, feed_forward = layer.mixer, layer.feed_forward
        others += mixer.weights_flops // 2 if isinstance(mixer, GroupedQueryAttention) else 0
        if isinstance(feed_forward, MixtureOfExperts):
            experts += 3 * shape.hidden_size * feed_forward.experts * feed_forward.expert_intermediate_size
            others += 3 * shape.hidden_size * feed_forward.shared_intermediate_size
        else:
            others += feed_forward.weights_flops // 2
    return {"none": 0, "fp8": experts, "fp8_all": experts + others}[quantization]


def stage_parameters(shape: ModelShape, tied: bool, pipeline: int) -> Parameters:
    """Of the largest pipeline stage: the one with the embedding or the head."""
    if pipeline == 1:
        return model_parameters(shape, tied)
    layers = sorted((layer_parameters(layer, shape.hidden_size) for layer in shape.layers), key=lambda one: -one.total)
    stage = sum(layers[: len(layers) // pipeline], Parameters())
    return stage + embedding_parameters(shape)


def embedding_parameters(shape: ModelShape) -> Parameters:
    """One matrix over the padded vocabulary, and the final norm."""
    rows = math.ceil(shape.vocab_size / _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    return Parameters(tensor=rows * shape.hidden_size, whole=shape.hidden_size)


def layer_parameters(layer: DecoderLayer, hidden_size: int) -> Parameters:
    """Of one decoder layer. A product with a weight is 2 FLOPs for each of its elements and tokens."""
    mixer, feed_forward = layer.mixer, layer.feed_forward
    norms = 2 * hidden_size
    if isinstance(mixer, GatedDeltaNet):
        norms += mixer.value_head_dim
        heads = 2 * mixer.value_heads
    else:
        heads = 0
        norms += 0 if isinstance(mixer, LatentAttention) else 2 * mixer.head_dim
    split = mixer.weights_flops // 2 + heads
    if not isinstance(feed_forward, MixtureOfExperts):
        return Parameters(tensor=split + feed_forward.weights_flops // 2, whole=norms)
    shared = 3 * hidden_size * feed_forward.shared_intermediate_size
    gate = hidden_size if feed_forward.shared_gate and shared else 0
    routed = 3 * hidden_size * feed_forward.expert_intermediate_size * feed_forward.experts
    router = hidden_size * feed_forward.experts
    return Parameters(tensor=split + shared, experts=routed, whole=norms + router + gate)
