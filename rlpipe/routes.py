"""Expert choices of the rollout engine, which the actor can repeat (R3, arXiv 2510.11370): their form for a model."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlpipe.errors import ConfigError
from rlpipe.flops import ModelShape
from rlpipe.flops.layers import MixtureOfExperts

Routes = NDArray[np.int16]
"""Expert numbers [tokens, layers, experts per token]; zeros where a layer has no experts."""


@dataclass(frozen=True)
class RouteShape:
    """What routes of a model look like: `expert_layers` are the layers that have experts, of `layers`."""

    layers: int
    expert_layers: tuple[int, ...]
    experts: int
    experts_per_token: int


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


def first_experts(tokens: int, shape: RouteShape) -> Routes:
    """Routes to experts 0, 1, ...: int16 [tokens, layers, experts per token]."""
    row = np.arange(shape.experts_per_token, dtype=np.int16)
    return np.broadcast_to(row, (tokens, shape.layers, shape.experts_per_token)).copy()
