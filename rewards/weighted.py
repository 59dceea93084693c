"""Several graders in one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rewards.grader_registry import call, check_grader
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.named_function import type_problem
from rlpipe.shared.sample import Reward


@dataclass(frozen=True)
class _Part:
    name: str
    weight: float
    options: Mapping[str, object]


def weighted(
    response: str,
    label: str,
    parts: Sequence[Mapping[str, object]],
    facts: Mapping[str, object] | None = None,
) -> Reward:
    """The sum of weight times score over `parts`, each `{name, weight, options}` (weight 1 and no options by default).

    `components` holds the unweighted score of each part under its name and what the first part reports itself;
    `correct` is the verdict of the first part that has one.
    """
    chosen = [_part(part) for part in parts]
    rewards = [call(part.name, response, label, part.options, facts or {}) for part in chosen]
    components = dict(rewards[0].components)
    components |= {part.name: reward.score for part, reward in zip(chosen, rewards, strict=True)}
    return Reward(
        score=sum(part.weight * reward.score for part, reward in zip(chosen, rewards, strict=True)),
        correct=next((reward.correct for reward in rewards if reward.correct is not None), None),
        reason="; ".join(f"{part.name}: {reward.reason}" for part, reward in zip(chosen, rewards, strict=True)),
        components=components,
    )


def check_parts(parts: Sequence[Mapping[str, object]], **_: object) -> None:
    """Raise ConfigError for parts that are empty, malformed, doubled or name a grader that does not fit."""
    for values in parts:
        if problem := type_problem(_Part, values):
            raise ConfigError(f"grader 'weighted': the part {dict(values)!r}: {problem}")
    chosen = [_part(part) for part in parts]
    names = [part.name for part in chosen]
    if not chosen or len(set(names)) < len(names):
        raise ConfigError(f"grader 'weighted': parts {names} must be at least one, each with a name of its own")
    for part in chosen:
        check_grader(part.name, part.options)


def _part(values: Mapping[str, object]) -> _Part:
    try:
        return _Part(**{"weight": 1.0, "options": {}, **values})  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(
            f"grader 'weighted': the part {dict(values)!r} must have a name and may have weight and options"
        ) from None
