"""Seconds that ranks of the actor exchange activations, from bytes and the layout, and what splitting layers costs
beside that."""

import math

from rlpipe.config.actor import ParallelConfig
from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.root import Config
from rlpipe.flops.layers import DecoderLayer, GatedDeltaNet, LatentAttention, Mixer, MixtureOfExperts
from rlpipe.flops.shape import ModelShape

_ACTIVATION_BYTES = 2


def exchange_seconds(
    config: Config, shape: ModelShape, cluster: ClusterConfig, own_tokens: float, own_packs: float
) -> float:
    """Of one rank and forward passes over all sequences; backward passes send what forward passes send.

    own_tokens: a context rank's part of the sequences that its data rank has, all of which tensor ranks pass together.
    own_packs: how many packs they come in.
    """
    parallel, speeds = config.actor.parallel, cluster.speeds
    if not cluster.gpus:
        return 0.0
    layers = shape.layers
    inside, experts = (
        sum(count(layer, shape.hidden_size, parallel) for layer in layers) / parallel.pipeline
        for count in (split_layer_bytes, expert_bytes)
    )
    between = shape.hidden_size * _ACTIVATION_BYTES / parallel.tensor if parallel.pipeline > 1 else 0.0
    width = parallel.tensor * parallel.context
    seconds = own_tokens * inside / _bytes_per_second(cluster, width)
    seconds += own_tokens * experts / _bytes_per_second(cluster, parallel.expert)
    seconds += own_tokens * between / _bytes_per_second(cluster, width * parallel.pipeline)
    return seconds + own_packs * len(layers) / parallel.pipeline * speeds.split_layer_seconds * math.log2(width)


def split_layer_bytes(layer: DecoderLayer, hidden_size: int, parallel: ParallelConfig) -> float:
    """That a GPU sends for a token of its context in a forward pass, where tensor and context ranks share the layer.

    Tensor ranks gather the inputs of mixer and of dense or shared feed-forward, and scatter the sums of their outputs
    (sequence parallelism, arXiv 2205.05198, section 4.2; without it the sum of both is as large). Context ranks of
    Gated DeltaNet swap tokens for heads and back, those of attention gather keys and values.
    """
    tensor, context = parallel.tensor, parallel.context
    feed_forward = layer.feed_forward
    has_shared = not isinstance(feed_forward, MixtureOfExperts) or feed_forward.shared_intermediate_size > 0
    gathered = 2 * (1 + has_shared) * hidden_size * (tensor - 1) / tensor
    return _ACTIVATION_BYTES * (gathered + _context_channels(layer.mixer, context) / tensor)


def expert_bytes(layer: DecoderLayer, hidden_size: int, parallel: ParallelConfig) -> float:
    """Likewise, where routed experts lie on several ranks: every choice of a token goes to its expert and comes back.
    Under sequence parallelism tensor ranks have each its own tokens."""
    if not isinstance(layer.feed_forward, MixtureOfExperts):
        return 0.0
    away = (parallel.expert - 1) / parallel.expert
    tokens = 1 / parallel.tensor if parallel.sequence else 1.0
    return _ACTIVATION_BYTES * 2 * layer.feed_forward.experts_per_token * hidden_size * away * tokens


def _context_channels(mixer: Mixer, context: int) -> float:
    if isinstance(mixer, GatedDeltaNet):
        values = mixer.value_heads * mixer.value_head_dim
        projected = 2 * mixer.key_heads * mixer.key_head_dim + 2 * values + 2 * mixer.value_heads
        return (projected + values) * (context - 1) / context
    if isinstance(mixer, LatentAttention):
        return (mixer.key_value_rank + mixer.rope_head_dim) * (context - 1)
    return 2 * mixer.key_value_heads * mixer.head_dim * (context - 1)


def _bytes_per_second(cluster: ClusterConfig, ranks: int) -> float:
    """Of one GPU, among so many that follow one another."""
    speed = cluster.network.gpu_to_gpu_gigabytes_per_second
    if ranks > cluster.node.gpus:
        speed = min(speed, cluster.network.node_to_node_gigabytes_per_second / cluster.node.gpus)
    return speed * cluster.speeds.exchange_share_of_link * 1e9
