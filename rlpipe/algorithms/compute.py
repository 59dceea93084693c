"""From graded samples to samples with advantages, with a count of everything out of the ordinary."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlpipe.algorithms.advantages import (
    EpisodeAdvantages,
    ScoredBatch,
    TurnAdvantages,
    advantage_function,
    equal_score_groups,
)
from rlpipe.algorithms.shaping import KLBySample, mask_truncated, overlong_penalty
from rlpipe.algorithms.turns import token_values, turn_table
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.shared.errors import DataError
from rlpipe.shared.sample import Episode, Sample, Status, by_episode, is_truncated
from rlpipe.shared.sample_table import Advantage, SampleTable


@dataclass(frozen=True)
class AdvantageCounts:
    """What the advantages were computed from. All counts but `samples` are of episodes or of groups of them;
    `equal_reward_groups` counts groups of at least two."""

    samples: int
    episodes: int
    groups: int
    failed_samples: int
    singleton_groups: int
    short_groups: int
    equal_reward_groups: int
    truncated_masked: int
    overlong_penalized: int
    kl_penalty_mean: float
    lone_turns: int
    advantage_abs_mean: float

    @property
    def metrics(self) -> dict[str, float]:
        """Values by their names in the metric dictionary."""
        return {
            "rollout/equal_reward_groups_count": self.equal_reward_groups,
            "advantage/groups_count": self.groups,
            "advantage/failed_samples_count": self.failed_samples,
            "advantage/singleton_groups_count": self.singleton_groups,
            "advantage/short_groups_count": self.short_groups,
            "advantage/truncated_masked_count": self.truncated_masked,
            "advantage/overlong_penalized_count": self.overlong_penalized,
            "advantage/kl_penalty_mean": self.kl_penalty_mean,
            "advantage/lone_turns_count": self.lone_turns,
            "advantage/abs_mean": self.advantage_abs_mean,
        }


@dataclass(frozen=True)
class AdvantageResult:
    """The samples that can be trained, in the order given, with `advantage` set."""

    samples: SampleTable
    counts: AdvantageCounts


def compute_advantages(
    samples: Sequence[Sample],
    config: AlgorithmConfig,
    *,
    max_response_tokens: int,
    kl_by_sample: KLBySample | None = None,
) -> AdvantageResult:
    """Shape rewards, then apply the advantage function that the configuration names.

    Each episode counts once, whatever the number of its branches, and its advantage goes to all of them. Failed samples
    are left out and counted; their group goes on with the rest. kl_by_sample: the KL estimate of each response token,
    needed where `config.kl.placement` is "reward". Raises DataError for no samples, for an episode without a reward or
    with several, and for a reward that is not finite.
    """
    graded = SampleTable.of(samples)
    if graded.failed.any():
        graded = SampleTable.of([sample for sample in samples if sample.status is not Status.FAILED])
    usable = by_episode(graded) if graded.of_episodes.any() else list(zip(graded, strict=True))
    if not usable:
        raise DataError(f"no sample of {len(samples)} can be trained: all failed")
    if len(usable) < len(graded):
        graded = SampleTable.of([sample for episode in usable for sample in episode])
    shaped = [mask_truncated(episode) for episode in usable] if config.overlong.mask_truncated else usable
    if shaped is not usable:
        graded = graded.with_samples([sample for episode in shaped for sample in episode])
    firsts = np.cumsum([0, *map(len, shaped[:-1])])
    longest_tokens = np.maximum.reduceat(graded.response_tokens, firsts)
    length_penalties = _length_penalties(longest_tokens, config, max_response_tokens)
    penalties = _token_penalties(shaped, config, kl_by_sample)
    _check_scores(graded, shaped)
    groups = graded.groups[firsts]
    batch = ScoredBatch(
        scores=graded.scores[firsts] + length_penalties,
        groups=groups,
        count_trained=lambda: np.add.reduceat(graded.trained_tokens, firsts),
        token_penalties=penalties,
        token_masks=tuple(map(_mask, shaped)) if penalties else None,
        find_turns=lambda: turn_table(shaped, groups),
    )
    found = advantage_function(config.advantage)(batch, config)
    by_turn = isinstance(found, TurnAdvantages)
    advantages = token_values(batch.turns, found.values, shaped) if isinstance(found, TurnAdvantages) else found
    sizes = np.bincount(batch.groups)
    return AdvantageResult(
        graded.with_advantages(_by_sample(shaped, advantages)),
        AdvantageCounts(
            samples=len(graded),
            episodes=len(shaped),
            groups=len(sizes),
            failed_samples=len(by_episode(samples)) - len(usable) if len(graded) < len(samples) else 0,
            singleton_groups=int((sizes == 1).sum()),
            short_groups=int((sizes < sizes.max()).sum()),
            equal_reward_groups=int((equal_score_groups(batch.returns, batch.groups) & (sizes > 1)).sum()),
            truncated_masked=sum(map(is_truncated, shaped)) if config.overlong.mask_truncated else 0,
            overlong_penalized=int(np.count_nonzero(length_penalties)),
            kl_penalty_mean=float(np.concatenate(penalties).mean()) if penalties else 0.0,
            lone_turns=batch.turns.lone if by_turn else 0,
            advantage_abs_mean=_mean(np.abs(_episode_means(advantages))),
        ),
    )


def _check_scores(samples: SampleTable, episodes: Sequence[Episode]) -> None:
    for index in np.flatnonzero(~np.isfinite(samples.scores)).tolist():
        name, reward = samples[index].sample_id, samples[index].reward
        raise DataError(f"sample {name} has the reward {reward}: grade it with a finite score")
    if len(episodes) == len(samples):
        return
    for episode in episodes:
        found = {sample.reward.score for sample in episode if sample.reward}
        if len(found) > 1:
            raise DataError(
                f"the branches of episode {episode[0].episode} have the scores {sorted(found)}: give all of them one"
            )


def _length_penalties(
    longest_tokens: NDArray[np.int64], config: AlgorithmConfig, max_response_tokens: int
) -> NDArray[np.float64]:
    """longest_tokens: int64 [n], responses of the longest branch of each episode."""
    overlong = config.overlong
    if overlong.buffer_tokens == 0 or overlong.penalty == 0:
        return np.zeros(len(longest_tokens))
    return np.array(
        [
            overlong.penalty * overlong_penalty(tokens, max_response_tokens, overlong.buffer_tokens)
            for tokens in longest_tokens.tolist()
        ]
    )


def _token_penalties(
    episodes: Sequence[Episode], config: AlgorithmConfig, kl_by_sample: KLBySample | None
) -> tuple[NDArray[np.float64], ...] | None:
    """The coefficient times the KL of each response token, branch after branch; 0 for tokens that are not trained."""
    if config.kl.coefficient == 0 or config.kl.placement != "reward":
        return None
    if kl_by_sample is None:
        raise DataError("algorithm.kl.placement is 'reward' but no KL was given: run the reference pass before grading")
    samples = [sample for episode in episodes for sample in episode]
    missing = [sample.sample_id for sample in samples if sample.sample_id not in kl_by_sample]
    if missing:
        raise DataError(f"{len(missing)} samples have no KL to the reference, the first is {missing[0]}")
    return tuple(
        config.kl.coefficient * np.concatenate([kl_by_sample[sample.sample_id] for sample in episode]) * _mask(episode)
        for episode in episodes
    )


def _mask(episode: Episode) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(sample.loss_mask, np.float64) for sample in episode])


def _by_sample(episodes: Sequence[Episode], advantages: EpisodeAdvantages) -> Sequence[Advantage]:
    """That of its episode for each sample; of several for each token its own."""
    if isinstance(advantages, np.ndarray):
        one_each: list[float] = np.repeat(advantages, list(map(len, episodes))).tolist()
        return one_each
    return [
        own
        for episode, values in zip(episodes, advantages, strict=True)
        for own in np.split(values, np.cumsum([one.response_tokens for one in episode])[:-1])
    ]


def _episode_means(advantages: EpisodeAdvantages) -> NDArray[np.float64]:
    """The advantage of each episode, which has one value or one for each token: float64 [n]."""
    return advantages if isinstance(advantages, np.ndarray) else np.array(list(map(_mean, advantages)))


def _mean(values: NDArray[np.float64]) -> float:
    """0 of no values."""
    return float(values.mean()) if values.size else 0.0
