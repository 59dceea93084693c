"""Advantage functions: from scores and groups to one number per episode. Chosen by name, numpy only."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlpipe.algorithms.turns import TurnTable, leave_one_out, normalized, turn_returns
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.named_function import call_problem, named_function

Scores = NDArray[np.float64]

STD_EPSILON = 1e-6
"""Added to standard deviations, so that a tiny spread does not become a huge advantage."""


@dataclass(frozen=True)
class ScoredBatch:
    """What an advantage function sees of `n` episodes, each of which is one response unless it has several branches.

    scores: float64 [n], rewards after shaping. groups: int64 [n], 0..G-1, every number in use. token_penalties: float64
    [response tokens] per episode to be subtracted from the reward token by token, for functions that keep token-level
    returns; None where there are none. Their sums are NOT part of `scores`. token_masks: float64 [response tokens] per
    episode, given with `token_penalties`; 1 where a token is trained. The response tokens of branches follow each
    other, in the order in which the policy last wrote in them. count_trained, find_turns: what `trained_tokens` and
    `turns` are, for the functions that ask for them.
    """

    scores: Scores
    groups: NDArray[np.int64]
    count_trained: Callable[[], NDArray[np.int64]]
    token_penalties: tuple[Scores, ...] | None = None
    token_masks: tuple[Scores, ...] | None = None
    find_turns: Callable[[], TurnTable] | None = None

    @cached_property
    def trained_tokens(self) -> NDArray[np.int64]:
        """Tokens of each episode that enter the loss: int64 [n]."""
        return self.count_trained()

    @cached_property
    def turns(self) -> TurnTable:
        """The turns of the episodes; their rewards are part of `scores`, and have no penalties subtracted. Raises
        ConfigError where there is nothing to find them."""
        if self.find_turns is None:
            raise ConfigError("the batch has no turns")
        return self.find_turns()

    @property
    def returns(self) -> Scores:
        """Scores less the penalties of the whole episode: float64 [n]."""
        if self.token_penalties is None:
            return self.scores
        penalties: Scores = np.array([one.sum() for one in self.token_penalties])
        return self.scores - penalties


@dataclass(frozen=True)
class TurnAdvantages:
    """values: float64 [turns], in the order of `ScoredBatch.turns`."""

    values: Scores


EpisodeAdvantages = Scores | tuple[Scores, ...]
"""float64 [n], or per episode float64 [response tokens]."""
Advantages = EpisodeAdvantages | TurnAdvantages
AdvantageFunction = Callable[[ScoredBatch, AlgorithmConfig], Advantages]

_REGISTRY: dict[str, AdvantageFunction] = {}


def register_advantage(name: str) -> Callable[[AdvantageFunction], AdvantageFunction]:
    """Decorator: make a function available as `algorithm.advantage: name`."""

    def register(function: AdvantageFunction) -> AdvantageFunction:
        if name in _REGISTRY:
            raise ConfigError(f"advantage '{name}' is registered twice: choose another name")
        _REGISTRY[name] = function
        return function

    return register


def advantage_function(name: str) -> AdvantageFunction:
    """The function registered as `name`, or the one at `package.module:function`.

    Raises ConfigError for a name that is not known, a path that cannot be imported, and a function that does not take
    exactly `(batch, config)`.
    """
    function: AdvantageFunction = named_function(name, _REGISTRY, "algorithm.advantage")
    if problem := call_problem(function, None, None):
        raise ConfigError(f"algorithm.advantage {name!r} is not a function of (batch, config): {problem}")
    return function


@register_advantage("grpo")
def grpo(batch: ScoredBatch, config: AlgorithmConfig) -> Scores:
    """(r - mean of the group) / (unbiased std of the group + 1e-6); GRPO, arXiv 2402.03300, section 4.1.2.

    Without the division where `normalize_by_std` is off. A group of one, and one of equal scores, gets exactly 0.
    """
    centred = _centred(batch.returns, batch.groups)
    if not config.normalize_by_std:
        return centred
    return centred / (_group_std(centred, batch.groups) + STD_EPSILON)


@register_advantage("dr_grpo")
def dr_grpo(batch: ScoredBatch, config: AlgorithmConfig) -> Scores:
    """r - mean of the group; Dr.GRPO, arXiv 2503.20783. Its loss is aggregated with `sequence_sum_norm`."""
    return _centred(batch.returns, batch.groups)


@register_advantage("rloo")
def rloo(batch: ScoredBatch, config: AlgorithmConfig) -> Scores:
    """r - mean of the OTHER responses of the group = (r - mean) n / (n - 1); RLOO, arXiv 2402.14740.

    A group of one has no others and gets 0.
    """
    sizes = np.bincount(batch.groups)[batch.groups]
    return _centred(batch.returns, batch.groups) * sizes / np.maximum(sizes - 1, 1)


@register_advantage("reinforce_plus_plus")
def reinforce_plus_plus(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Token returns r - sum of the KL penalties from here on, whitened over all trained tokens of the batch.

    REINFORCE++, arXiv 2501.03262, with discount 1. Needs no groups; the batch is its baseline by definition.
    """
    if batch.token_penalties is None or batch.token_masks is None:
        return _whitened(batch.scores, batch.trained_tokens)
    returns = [
        score - np.cumsum(penalties[::-1])[::-1]
        for score, penalties in zip(batch.scores, batch.token_penalties, strict=True)
    ]
    whitened = _whitened(np.concatenate(returns), np.concatenate(batch.token_masks))
    return tuple(np.split(whitened, np.cumsum([len(values) for values in returns])[:-1]))


@register_advantage("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(batch: ScoredBatch, config: AlgorithmConfig) -> Scores:
    """(r - mean of the group), then whitened over all trained tokens of the batch; arXiv 2501.03262.

    Groups of one and of equal scores enter the whitening with 0.
    """
    return _whitened(_centred(batch.returns, batch.groups), batch.trained_tokens)


@register_advantage("turn_rloo")
def turn_rloo(batch: ScoredBatch, config: AlgorithmConfig) -> TurnAdvantages:
    """Each turn's discounted return less the mean of the OTHER episodes' at the same turn; `rlpipe.algorithms.turns`.

    The leave-one-out baseline of RLOO (arXiv 2402.14740) by turns: what the others of the group got is independent of
    what this turn wrote, so the gradient stays unbiased. A turn that no other episode of the group reaches gets 0.
    """
    table, returns = _turn_returns(batch, config)
    return TurnAdvantages(leave_one_out(returns, table.peers))


@register_advantage("turn_grpo")
def turn_grpo(batch: ScoredBatch, config: AlgorithmConfig) -> TurnAdvantages:
    """Each turn's discounted return, normalized over the group's episodes at the same turn.

    GRPO's group statistics (arXiv 2402.03300) turn by turn, as in turn-level credit assignment (arXiv 2505.11821).
    Without the division where `normalize_by_std` is off.
    """
    table, returns = _turn_returns(batch, config)
    epsilon = STD_EPSILON
    if not config.normalize_by_std:
        sizes = np.bincount(table.peers)[table.peers]
        return TurnAdvantages(leave_one_out(returns, table.peers) * np.maximum(sizes - 1, 1) / sizes)
    return TurnAdvantages(normalized(returns, table.peers, epsilon))


def _turn_returns(batch: ScoredBatch, config: AlgorithmConfig) -> tuple[TurnTable, Scores]:
    """What a score holds beyond the rewards of its turns is earned by the last turn."""
    table = batch.turns
    given = np.bincount(table.episodes, weights=table.rewards, minlength=len(batch.scores))
    outcomes = (batch.returns - given)[table.episodes]
    return table, turn_returns(table, outcomes, config.turn_discount)


def equal_score_groups(scores: Scores, groups: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool [G]: groups whose scores are all the same, groups of one included."""
    count = int(groups.max()) + 1
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, groups, scores)
    np.maximum.at(high, groups, scores)
    equal: NDArray[np.bool_] = low == high
    return equal


def _centred(scores: Scores, groups: NDArray[np.int64]) -> Scores:
    """Scores less the mean of their group; exactly 0 where all are equal, whatever rounding the mean has."""
    means = np.bincount(groups, weights=scores) / np.bincount(groups)
    return np.where(equal_score_groups(scores, groups)[groups], 0.0, scores - means[groups])


def _group_std(centred: Scores, groups: NDArray[np.int64]) -> Scores:
    """Unbiased standard deviation of each score's group; 0 for a group of one."""
    squares = np.bincount(groups, weights=centred**2)
    return np.sqrt(squares / np.maximum(np.bincount(groups) - 1, 1))[groups]


def _whitened(values: Scores, weights: NDArray[np.number]) -> Scores:
    """Zero mean and unit variance over the batch, each value counted `weights` times; 0 where all are equal."""
    total = weights.sum()
    if total == 0 or values.max() == values.min():
        return np.zeros_like(values)
    centred: Scores = values - (values * weights).sum() / total
    return centred / (float(np.sqrt((centred**2 * weights).sum() / total)) + STD_EPSILON)
