"""Which environments there are. The configuration names one, or a class of your own."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from rlpipe.config.environment import EnvironmentConfig
from rlpipe.environments.bounded import call_within
from rlpipe.environments.protocol import Environment
from rlpipe.shared.errors import ConfigError, RlpipeError
from rlpipe.shared.import_trial import first_line
from rlpipe.shared.named_function import call_problem, named_function, type_problem

ENVIRONMENTS: Mapping[str, str] = {
    "calculation": "rlpipe.environments.tasks.calculation:Calculation",
    "commands": "rlpipe.environments.tasks.commands:Commands",
    "gymnasium": "rlpipe.environments.adapters.gymnasium_text:GymnasiumText",
    "mcp": "rlpipe.environments.adapters.mcp_tools:McpTools",
    "grid": "rlpipe.environments.tasks.grid:Grid",
    "repair": "rlpipe.environments.tasks.repair:Repair",
    "search": "rlpipe.environments.tasks.search:Search",
    "signals": "rlpipe.environments.tasks.signals:Signals",
}
"""Registered environments by name; the module of one is imported when it is first used."""

Answer = TypeVar("Answer")

_PLACE = "rollout.generate.environment.name"
_METHODS = ("reset", "step", "result", "close")


def environment_maker(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Makes the environment of one episode. Raises ConfigError for what is none, or does not take the options."""
    made: Callable[..., Environment] = named_function(config.name, ENVIRONMENTS, _PLACE)
    if problem := call_problem(made, **config.options):
        raise ConfigError(f"{_PLACE} {config.name!r} does not take the options {sorted(config.options)}: {problem}")
    if config.name in ENVIRONMENTS and (problem := type_problem(made, config.options)):
        raise ConfigError(f"{_PLACE} {config.name!r}: option {problem}")
    # What a signature cannot tell about options is told by a ConfigError of its own.
    first = _answer(config, "being made", lambda: made(**config.options))
    if missing := [name for name in (*_METHODS, "tools") if not hasattr(first, name)]:
        raise ConfigError(f"{_PLACE} {config.name!r} is no environment: it lacks {', '.join(missing)}")
    return lambda: made(**config.options)


def task_rows(config: EnvironmentConfig, train: int, test: int, seed: int) -> tuple[Iterable[Any], Iterable[Any]]:
    """Rows of the environment's own tasks, for training and for a test, all different.

    Raises ConfigError where it makes none, or fewer than asked for.
    """
    environment: Any = environment_maker(config)()
    if not hasattr(environment, "tasks"):
        raise ConfigError(f"prepare.tasks: the environment {config.name!r} makes no tasks; give data sets of your own")
    rows = _answer(config, "making tasks", lambda: list(environment.tasks(train + test, seed)))
    if len(rows) < train + test:
        raise ConfigError(
            f"prepare.tasks asks for {train + test} tasks, but the environment {config.name!r} makes only {len(rows)}: "
            "lower train or test"
        )
    return rows[test:], rows[:test]


def _answer(config: EnvironmentConfig, doing: str, function: Callable[[], Answer]) -> Answer:
    """What someone else's program returns. Raises ConfigError where it fails or hangs, and RlpipeError as it is."""
    try:
        return call_within(config.step_seconds, function, "environment")
    except RlpipeError:
        raise
    except TimeoutError:
        raise ConfigError(
            f"{_PLACE} {config.name!r}: {doing} took longer than environment.step_seconds = {config.step_seconds:g}"
        ) from None
    except Exception as error:
        raise ConfigError(
            f"{_PLACE} {config.name!r}: {doing} failed with {type(error).__name__}: {first_line(error)}; see it with "
            "--debug"
        ) from error
