"""Which layers of a model have experts, as replayed expert choices need it."""

from rlpipe.flops.layers import MixtureOfExperts
from rlpipe.flops.shape import ModelShape
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.expert_routes import RouteShape


def route_shape(model: ModelShape) -> RouteShape:
    """Raises ConfigError for a model without experts, or with layers of different numbers of them."""
    found = {
        number: layer.feed_forward
        for number, layer in enumerate(model.layers)
        if isinstance(layer.feed_forward, MixtureOfExperts)
    }
    sizes = {(one.experts, one.experts_per_token) for one in found.values()}
    if len(sizes) != 1:
        kinds = "no experts" if not sizes else f"layers of different experts {sorted(sizes)}"
        raise ConfigError(f"algorithm.routing_replay is set, but model type {model.model_type!r} has {kinds}")
    ((experts, per_token),) = sizes
    return RouteShape(len(model.layers), tuple(found), experts, per_token)
