"""Held-out evaluation: greedy accuracy, or pass@k with sampled answers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import comb

from rlpipe.config.root import Config
from rlpipe.generation.producer import Rollouts
from rlpipe.generation.prompt_requests import requests_for_prompts
from rlpipe.shared.sample import Prompt, Sample, by_episode
from rollout.requests import SamplingParameters


class Evaluation:
    """The evaluation sets of a run, each with its own sampling and cadence."""

    def __init__(self, config: Config, prompts: Mapping[str, Sequence[Prompt]]) -> None:
        self._config = config
        self._prompts = prompts

    def run(self, iteration: int, rollouts: Rollouts) -> dict[str, float]:
        """Metrics of the sets that are due after `iteration`, under the weights that the engines hold."""
        metrics: dict[str, float] = {}
        settings = self._config.eval
        for dataset in self._config.due_evaluations(iteration):
            sampling = SamplingParameters.evaluation(self._config.rollout, settings, dataset)
            prefix = f"eval-{dataset.name}-{iteration:06d}"
            requests = requests_for_prompts(prefix, self._prompts[dataset.name], settings.samples_of(dataset), sampling)
            samples = rollouts.run(requests)
            metrics.update({f"eval/{dataset.name}/{key}": value for key, value in score(samples).items()})
            metrics[f"eval/{dataset.name}/grading_failures_count"] = float(rollouts.take_grading_failures())
        return metrics


def score(samples: Sequence[Sample]) -> dict[str, float]:
    """Accuracy and mean reward of the episodes, mean length of their samples; pass@k for k = 2, 4, ... where problems
    have several answers. Graders that give numbers alone know no accuracy."""
    groups: dict[str, list[bool]] = defaultdict(list)
    episodes = [episode[0] for episode in by_episode(samples)]
    for episode in episodes:
        groups[episode.group_id].append(episode.reward is not None and episode.reward.correct is True)
    count = len(episodes)
    metrics = {
        "reward_mean": sum(episode.reward.score for episode in episodes if episode.reward) / count,
        "response_tokens_mean": sum(sample.response_tokens for sample in samples) / len(samples),
    }
    rewards = [episode.reward for episode in episodes if episode.reward]
    if rewards and all(reward.correct is None for reward in rewards):
        return metrics
    metrics["accuracy"] = sum(map(sum, groups.values())) / count
    answers = min(map(len, groups.values()))
    k = 2
    while k <= answers:
        metrics[f"pass_at_{k}"] = sum(pass_at_k(len(g), sum(g), k) for g in groups.values()) / len(groups)
        k *= 2
    return metrics


def pass_at_k(answers: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k answers is correct (Chen et al. 2021, arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(answers - correct, k) / comb(answers, k)
