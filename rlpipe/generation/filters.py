"""Which finished groups are trained. Chosen by name, or your own."""

from collections.abc import Callable, Mapping, Sequence

from rlpipe.shared.errors import ConfigError
from rlpipe.shared.named_function import call_problem, named_function
from rlpipe.shared.sample import Sample, Status, by_episode, is_truncated

GroupFilter = Callable[[Sequence[Sample]], str | None]
"""Of the samples of all episodes of a graded group. None keeps it; a word says why it is dropped, and is counted."""


def equal_rewards(samples: Sequence[Sample]) -> str | None:
    """Drops groups that teach nothing because all scores are equal (dynamic sampling; DAPO, arXiv 2503.14476, 3.2)."""
    scores = {sample.reward.score for sample in samples if sample.reward is not None}
    return "equal_rewards" if len(scores) < 2 else None


def truncated(samples: Sequence[Sample]) -> str | None:
    """Drops groups whose episodes all met the token limit."""
    return "truncated" if all(map(is_truncated, by_episode(samples))) else None


FILTERS: Mapping[str, GroupFilter] = {"equal_rewards": equal_rewards, "truncated": truncated}
"""Registered filters."""


def group_filters(names: Sequence[str]) -> tuple[GroupFilter, ...]:
    """The filters of these names or paths. Raises ConfigError for one that is unknown, or not a function of a group."""
    return tuple(_group_filter(name) for name in names)


def drop_reason(samples: Sequence[Sample], filters: Sequence[GroupFilter]) -> str | None:
    """Why a graded group is dropped, by the first filter that drops it; None when it is kept."""
    if all(sample.status is Status.FAILED for sample in samples):
        return "failed"
    usable = [sample for sample in samples if sample.status is not Status.FAILED]
    return next((reason for one in filters if (reason := one(usable))), None)


def _group_filter(name: str) -> GroupFilter:
    function: GroupFilter = named_function(name, FILTERS, "rollout.filters")
    if problem := call_problem(function, ()):
        raise ConfigError(f"rollout.filters {name!r} is not a function of a group's samples: {problem}")
    return function
