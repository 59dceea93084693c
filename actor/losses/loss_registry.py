"""Losses by name: registered ones, and a user's own as `package.module:function`."""

from collections.abc import Callable, Mapping
from typing import cast

from actor.losses.types import LossInputs, LossOutput
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.named_function import call_problem, named_function, tried_function

Loss = Callable[[LossInputs, AlgorithmConfig], LossOutput]
_PLACE = "algorithm.loss"

LOSSES: Mapping[str, str] = {
    "ppo_clip": "actor.losses.clipped:ppo_clip",
    "ppo_dual_clip": "actor.losses.clipped_variants:ppo_dual_clip",
    "gspo": "actor.losses.clipped_variants:gspo",
    "cispo": "actor.losses.clipped_variants:cispo",
    "sft": "actor.losses.clipped:sft",
}
"""Registered losses by name; the module of a loss is imported when it is first used."""


def find_loss(name: str) -> Loss:
    """The loss called `name`, which `check_loss` has seen in the driver. Raises ConfigError for a name that is not
    known, a path that cannot be imported, and a function that does not take exactly `(inputs, config)`."""
    loss = cast(Loss, tried_function(name, LOSSES, _PLACE))
    if problem := call_problem(loss, None, None):
        raise ConfigError(f"{_PLACE} {name!r} is not a function of (inputs, config): {problem}")
    return loss


def check_loss(name: str) -> None:
    """Raises like `find_loss`, and for a module that hangs or ends the process that imports it."""
    named_function(name, LOSSES, _PLACE)
    find_loss(name)
