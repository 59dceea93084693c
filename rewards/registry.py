"""Which graders there are, and the one function that calls any of them.

A grader is a plain function `(response: str, label: str, **options) -> Reward`. Besides its options it may name
*facts* of the sample as keyword parameters; it gets those that are known:

- `response_tokens` (int): length of the response in tokens;
- `truncated` (bool): the response met its token limit;
- `prompt` (str): the text of the prompt;
- `metadata` (mapping): the other columns of the prompt's row;
- `facts` (mapping): all of the above, for graders that call other graders.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import cache

from rlpipe.errors import ConfigError
from rlpipe.sample import Reward, Sample, Status

Grader = Callable[..., Reward | float]

FACTS = ("response_tokens", "truncated", "prompt", "metadata", "facts")

GRADERS: Mapping[str, str] = {
    "math": "rewards.mathematics:math",
    "deepscaler": "rewards.mathematics:deepscaler",
    "dapo": "rewards.mathematics:dapo",
    "gsm8k": "rewards.mathematics:gsm8k",
}
"""Registered graders by name; the module of a grader is imported when it is first used."""


def grade(name: str, response: str, label: str, **options: object) -> Reward:
    """Reward of `response` against `label` by the grader `name` (registered, or `package.module:function`).

    Pure, and without a time limit: what comes from a model is graded in a `rewards.pool.GradingPool`.
    Raises ConfigError for an unknown grader; an error inside the grader is raised as it is.
    """
    return call(name, response, label, options, facts={})


def call(name: str, response: str, label: str, options: Mapping[str, object], facts: Mapping[str, object]) -> Reward:
    """`grade` with the facts that are known about the sample; an option of the same name wins over a fact."""
    grader = find_grader(name)
    known = {**facts, "facts": facts}
    wanted = {fact: known[fact] for fact in _wanted_facts(grader) if fact in known}
    reward = grader(response, label, **{**wanted, **options})
    if isinstance(reward, Reward):
        return reward
    return Reward(score=float(reward), correct=None, reason=f"score of {name}")


def facts_of(sample: Sample) -> dict[str, object]:
    """The facts of a sample that graders may ask for."""
    return {
        "response_tokens": sample.response_tokens,
        "truncated": sample.status is Status.TRUNCATED,
        "prompt": sample.prompt.text,
        "metadata": dict(sample.prompt.metadata),
    }


@cache
def find_grader(name: str) -> Grader:
    """The function behind a registered name or a dotted path. Raises ConfigError with what is wrong."""
    path = GRADERS.get(name, name)
    module_name, colon, function_name = path.partition(":")
    if not colon:
        raise ConfigError(
            f"unknown grader {name!r}: use one of {', '.join(sorted(GRADERS))}, or package.module:function"
        )
    try:
        grader = getattr(importlib.import_module(module_name), function_name)
    except ImportError as error:
        raise ConfigError(f"grader {name!r}: cannot import {module_name!r} ({error}); mend the dotted path") from error
    except AttributeError:
        raise ConfigError(f"grader {name!r}: module {module_name!r} has no {function_name!r}") from None
    if not callable(grader):
        raise ConfigError(f"grader {name!r} is a {type(grader).__name__}, not a function")
    return grader


def check_grader(name: str, options: Mapping[str, object]) -> None:
    """Raise ConfigError unless the grader exists and takes `(response, label, **options)`."""
    grader = find_grader(name)
    signature = inspect.signature(grader)
    facts = dict.fromkeys(_wanted_facts(grader))
    try:
        signature.bind("", "", **{**facts, **options})
    except TypeError as error:
        raise ConfigError(
            f"grader {name!r} with options {dict(options)!r}: {error}; its signature is {signature}, and it is called "
            "with (response, label, **options)"
        ) from None


@cache
def _wanted_facts(grader: Grader) -> tuple[str, ...]:
    parameters = inspect.signature(grader).parameters
    return tuple(fact for fact in FACTS if fact in parameters)
