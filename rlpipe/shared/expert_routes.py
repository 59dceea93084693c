"""Expert choices of the rollout engine, which the actor can repeat (R3, arXiv 2510.11370): their form for a model."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Routes = NDArray[np.int16]
"""Expert numbers [tokens, layers, experts per token]; zeros where a layer has no experts."""


@dataclass(frozen=True)
class RouteShape:
    """What routes of a model look like: `expert_layers` are the layers that have experts, of `layers`."""

    layers: int
    expert_layers: tuple[int, ...]
    experts: int
    experts_per_token: int


def first_experts(tokens: int, shape: RouteShape) -> Routes:
    """Routes to experts 0, 1, ...: int16 [tokens, layers, experts per token]."""
    row = np.arange(shape.experts_per_token, dtype=np.int16)
    return np.broadcast_to(row, (tokens, shape.layers, shape.experts_per_token)).copy()
