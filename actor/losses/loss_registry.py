"""The table of losses by name."""

from collections.abc import Callable

from actor.losses.types import LossInputs, LossOutput
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.shared.errors import ConfigError

Loss = Callable[[LossInputs, AlgorithmConfig], LossOutput]

_LOSSES: dict[str, Loss] = {}


def register_loss(name: str) -> Callable[[Loss], Loss]:
    """Decorator: make a loss available as `algorithm.loss: name`."""

    def register(loss: Loss) -> Loss:
        if name in _LOSSES:
            raise ValueError(f"loss {name!r} is registered twice")
        _LOSSES[name] = loss
        return loss

    return register


def find_loss(name: str) -> Loss:
    """The loss called `name`; ConfigError, listing the known ones, if there is none."""
    if name not in _LOSSES:
        raise ConfigError(
            f"algorithm.loss is {name!r}, which is not registered: use one of {', '.join(sorted(_LOSSES))}"
        )
    return _LOSSES[name]
