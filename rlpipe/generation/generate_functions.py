"""Generate functions: how one response comes about. Chosen by name, or your own."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from rlpipe.config.rollout import GenerateConfig
from rlpipe.generation.calculator import calculator
from rlpipe.generation.conversation import Conversation
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.named_function import call_problem, named_function, type_problem

GenerateFunction = Callable[[Conversation], Awaitable[None]]


async def single_turn(conversation: Conversation) -> None:
    """The policy writes once."""
    await conversation.write()


FUNCTIONS: Mapping[str, Callable[..., Awaitable[None]]] = {"single_turn": single_turn, "calculator": calculator}
"""Registered generate functions."""


def generate_function(settings: GenerateConfig, makers: Mapping[str, str] = {}) -> GenerateFunction:
    """The function that `settings` names, with its options. makers: other names that are known, but not here.

    Raises ConfigError for a name that is not known, a path that cannot be imported, and a signature that is not
    `async def function(conversation, **options)`.
    """
    function = named_function(settings.function, {**FUNCTIONS, **makers}, "rollout.generate.function")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"rollout.generate.function '{settings.function}' is not an `async def` function")
    if problem := call_problem(function, None, **settings.options):
        raise ConfigError(
            f"rollout.generate.function '{settings.function}' does not take (conversation, **options) with the options "
            f"{sorted(settings.options)}: {problem}"
        )
    if settings.function in FUNCTIONS and (problem := type_problem(function, settings.options)):
        raise ConfigError(f"rollout.generate.function '{settings.function}': option {problem}")
    return partial(function, **settings.options)
