"""Held-out evaluation: greedy accuracy, or pass@k with sampled answers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import comb

from rlpipe.config.root import Config
from rlpipe.rollouts import Rollouts, ask_groups
from rlpipe.sample import Prompt, Sample
from rollout.requests import SamplingParameters


class Evaluation:
    """The evaluation sets of a run."""

    def __init__(self, config: Config, prompts: Mapping[str, Sequence[Prompt]]) -> None:
        self._config = config
        self._prompts = prompts
        self._sampling = SamplingParameters(
            max_new_tokens=config.eval.max_response_tokens or config.rollout.max_response_tokens,
            temperature=config.eval.temperature,
            top_p=config.eval.top_p,
            stop=tuple(config.rollout.sampling.stop),
            stop_token_ids=tuple(config.rollout.sampling.stop_token_ids),
        )

    def is_due(self, iteration: int) -> bool:
        """Before the first iteration (0), every `interval_iterations`, and after the last one."""
        settings = self._config.eval
        if not self._prompts:
            return False
        if iteration == 0:
            return settings.before_training
        interval = settings.interval_iterations
        return iteration == self._config.run.iterations or (interval > 0 and iteration % interval == 0)

    def run(self, iteration: int, rollouts: Rollouts) -> dict[str, float]:
        """Metrics of all evaluation sets under the weights that the engines hold."""
        metrics: dict[str, float] = {}
        for name, prompts in self._prompts.items():
            prefix = f"eval-{name}-{iteration:06d}"
            asks = ask_groups(prefix, prompts, self._config.eval.samples_per_prompt, self._sampling)
            samples = rollouts.graded(rollouts.generate(asks, self._config.deadlines.rollout_seconds))
            metrics.update({f"eval/{name}/{key}": value for key, value in score(samples).items()})
            metrics[f"eval/{name}/grading_failures_count"] = float(rollouts.take_grading_failures())
        return metrics


def score(samples: Sequence[Sample]) -> dict[str, float]:
    """Accuracy, mean reward and length; pass@k for k = 2, 4, ... where problems have several answers."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(sample.reward is not None and sample.reward.correct is True)
    count = len(samples)
    metrics = {
        "accuracy": sum(map(sum, groups.values())) / count,
        "reward_mean": sum(sample.reward.score for sample in samples if sample.reward) / count,
        "response_tokens_mean": sum(sample.response_tokens for sample in samples) / count,
    }
    answers = min(map(len, groups.values()))
    k = 2
    while k <= answers:
        metrics[f"pass_at_{k}"] = sum(pass_at_k(len(g), sum(g), k) for g in groups.values()) / len(groups)
        k *= 2
    return metrics


def pass_at_k(answers: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k answers is correct (Chen et al. 2021, arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(answers - correct, k) / comb(answers, k)
