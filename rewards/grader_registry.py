"""Which graders there are, and the one function that calls any of them.

A grader is a plain function `(response: str, label: str, **options) -> Reward`. Besides its options it may name
*facts* of the sample as keyword parameters; it gets those that are known:

- `response_tokens` (int): length of the response in tokens;
- `truncated` (bool): the response met its token limit;
- `prompt` (str): the text of the prompt;
- `metadata` (mapping): the other columns of the prompt's row;
- `environment` (mapping): what the environment of the episode tells, where there is one: `reward` of the end,
  `turn_rewards` (their sum), `turns` (how many), `success`, `state`, `ended`;
- `facts` (mapping): all of the above, for graders that call other graders.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache

from rlpipe.shared.errors import ConfigError
from rlpipe.shared.named_function import call_problem, named_function, tried_function, type_problem
from rlpipe.shared.sample import Reward, Sample, Status

Grader = Callable[..., Reward | float]

FACTS = ("response_tokens", "truncated", "prompt", "metadata", "environment", "facts")

GRADERS: Mapping[str, str] = {
    "math": "rewards.mathematics:math",
    "deepscaler": "rewards.mathematics:deepscaler",
    "dapo": "rewards.mathematics:dapo",
    "gsm8k": "rewards.mathematics:gsm8k",
    "multiple_choice": "rewards.choice:multiple_choice",
    "f1": "rewards.text:f1",
    "exact_match": "rewards.text:exact_match",
    "ifeval": "rewards.ifeval:ifeval",
    "length": "rewards.form_penalties:length",
    "repetition": "rewards.form_penalties:repetition",
    "code": "rewards.code:code",
    "remote": "rewards.remote_grader:remote",
    "weighted": "rewards.weighted:weighted",
    "environment": "rewards.environment:environment",
}
"""Registered graders by name; the module of a grader is imported when it is first used."""

_OPTION_CHECKS: Mapping[str, str] = {
    "code": "rewards.code:check_code",
    "remote": "rewards.remote_grader:check_remote",
    "weighted": "rewards.weighted:check_parts",
}
"""What a signature cannot tell about options is checked by these functions; they raise ConfigError."""


def grade(name: str, response: str, label: str, **options: object) -> Reward:
    """Reward of `response` against `label` by the grader `name` (registered, or `package.module:function`).

    Pure, and without a time limit: what comes from a model is graded in a `rewards.grading_pool.GradingPool`.
    Raises ConfigError for an unknown grader, ValueError for a score that is not finite, and what the grader raises.
    """
    return call(name, response, label, options, facts={})


def call(name: str, response: str, label: str, options: Mapping[str, object], facts: Mapping[str, object]) -> Reward:
    """`grade` with the facts that are known about the sample; an option of the same name wins over a fact."""
    grader = find_grader(name)
    known = {**facts, "facts": facts}
    wanted = {fact: known[fact] for fact in _wanted_facts(grader) if fact in known}
    reward = grader(response, label, **{**wanted, **options})
    if isinstance(reward, str | bytes):  # which Python would read as a number
        raise TypeError(f"grader {name!r} gave a text for a score: {reward[:80]!r}")
    if not isinstance(reward, Reward):
        reward = Reward(float(reward), None, f"score of {name}")
    if not math.isfinite(reward.score):
        raise ValueError(f"grader {name!r} gave the score {reward.score}; a score must be finite")
    # Plain types, whatever a grader of someone else's put in: rewards travel between processes and into JSON.
    return Reward(
        score=float(reward.score),
        correct=None if reward.correct is None else bool(reward.correct),
        reason=str(reward.reason),
        components={str(component): float(value) for component, value in reward.components.items()},
    )


def facts_of(sample: Sample) -> dict[str, object]:
    """The facts of a sample that graders may ask for."""
    facts: dict[str, object] = {
        "response_tokens": sample.response_tokens,
        "truncated": sample.status is Status.TRUNCATED,
        "prompt": sample.prompt.text,
        "metadata": dict(sample.prompt.metadata),
    }
    if sample.outcome is not None:
        facts["environment"] = {
            "reward": sample.outcome.reward,
            "success": sample.outcome.success,
            "state": dict(sample.outcome.state),
            "ended": sample.outcome.ended,
            "turns": sample.outcome.turns,
            "turn_rewards": sample.outcome.turn_rewards,
        }
    return facts


@cache
def find_grader(name: str) -> Grader:
    """The function behind a registered name or a dotted path, imported here: what a module does then is not limited
    before `check_grader` has tried it. Raises ConfigError with what is wrong."""
    grader: Grader = tried_function(name, GRADERS, "grader")
    return grader


def check_grader(name: str, options: Mapping[str, object]) -> None:
    """Raise ConfigError unless the grader exists and takes `(response, label, **options)`."""
    named_function(name, GRADERS, "grader")
    grader = find_grader(name)
    facts = dict.fromkeys(_wanted_facts(grader))
    if problem := call_problem(grader, "", "", **{**facts, **options}):
        raise ConfigError(
            f"grader {name!r} with options {dict(options)!r}: {problem}; it is called with (response, label, **options)"
        )
    if name in GRADERS and (problem := type_problem(grader, options)):
        raise ConfigError(f"grader {name!r}: option {problem}")
    if name in _OPTION_CHECKS:
        named_function(name, _OPTION_CHECKS, "options of grader")(**options)


@cache
def _wanted_facts(grader: Grader) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(grader).parameters
    except ValueError:  # some functions of C have no signature; `check_grader` refuses them
        return ()
    return tuple(fact for fact in FACTS if fact in parameters)
