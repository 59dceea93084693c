"""Generate functions: how one response comes about. Chosen by name, or your own."""

import inspect
from collections.abc import Awaitable, Callable
from functools import partial

from rlpipe.config.rollout import GenerateConfig
from rlpipe.generation.calculator import calculator
from rlpipe.generation.conversation import Conversation
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.named_function import call_problem, named_function

GenerateFunction = Callable[[Conversation], Awaitable[None]]


async def single_turn(conversation: Conversation) -> None:
    """The policy writes once."""
    await conversation.write()


FUNCTIONS: dict[str, Callable[..., Awaitable[None]]] = {"single_turn": single_turn, "calculator": calculator}
"""Registered generate functions."""

FACTORIES: dict[str, str] = {"environment": "rlpipe.environments.episode:environment_function"}
"""Generate functions of rooms above this one: what makes them, from `(settings, max_prompt_tokens)`."""


def generate_function(settings: GenerateConfig, max_prompt_tokens: int) -> GenerateFunction:
    """The function that `settings` names, with its options. max_prompt_tokens: the limit of prompts it makes itself.

    Raises ConfigError for a name that is not known, a path that cannot be imported, and a signature that is not
    `async def function(conversation, **options)`.
    """
    if settings.function in FACTORIES:
        made: GenerateFunction = named_function(settings.function, FACTORIES, "rollout.generate.function")(
            settings, max_prompt_tokens
        )
        return made
    function = named_function(settings.function, {**FUNCTIONS, **FACTORIES}, "rollout.generate.function")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"rollout.generate.function '{settings.function}' is not an `async def` function")
    if problem := call_problem(function, None, **settings.options):
        raise ConfigError(
            f"rollout.generate.function '{settings.function}' does not take (conversation, **options) with the options "
            f"{sorted(settings.options)}: {problem}"
        )
    return partial(function, **settings.options)
