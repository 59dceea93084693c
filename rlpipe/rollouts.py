"""Asking the engines for responses and grading them while others are still generated."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import rewards.metrics
from rewards.pool import GradingPool
from rlpipe.console import Console
from rlpipe.inputs import Inputs
from rlpipe.sample import Prompt, Reward, Sample
from rollout.pool import RolloutPool
from rollout.requests import GenerateRequest, Generation, SamplingParameters, sample_seed
from rollout.samples import to_sample


@dataclass(frozen=True)
class Ask:
    """One response that is wanted. The sample id alone, with the run's seed, decides its random numbers."""

    sample_id: str
    group_id: str
    prompt: Prompt
    sampling: SamplingParameters


def ask_groups(prefix: str, prompts: Iterable[Prompt], samples: int, sampling: SamplingParameters) -> list[Ask]:
    """`samples` responses for each prompt; ids are `prefix-group-sample`, so they recur when an iteration is redone."""
    return [
        Ask(f"{prefix}-{group:05d}-{index:03d}", f"{prefix}-{group:05d}", prompt, sampling)
        for group, prompt in enumerate(prompts)
        for index in range(samples)
    ]


class Rollouts:
    """The engines and the graders as one: `generate` starts grading each response as it arrives, `graded` waits."""

    def __init__(
        self,
        pool: RolloutPool,
        grading: GradingPool,
        inputs: Inputs,
        console: Console,
    ) -> None:
        self._pool = pool
        self._grading = grading
        self._chooser = inputs.chooser
        self._tokenizer = inputs.tokenizer
        self._seed = inputs.config.seed
        self._console = console
        self._futures: dict[str, Future[Reward]] = {}

    def generate(self, asks: Sequence[Ask], deadline_seconds: float) -> list[Sample]:
        """One ungraded sample for each of `asks`, in their order."""
        by_id = {ask.sample_id: ask for ask in asks}
        samples: dict[str, Sample] = {}

        def finished(generation: Generation) -> None:
            sample = self._sample(by_id[generation.request_id], generation)
            samples[sample.sample_id] = sample
            self._futures[sample.sample_id] = self._submit(sample)
            self._console.progress(len(samples), len(asks))

        requests = [
            GenerateRequest(ask.sample_id, ask.prompt.token_ids, ask.sampling, sample_seed(self._seed, ask.sample_id))
            for ask in asks
        ]
        self._pool.generate(requests, deadline_seconds, on_finished=finished)
        return [samples[ask.sample_id] for ask in asks]

    def graded(self, samples: Iterable[Sample]) -> list[Sample]:
        """The same samples with their rewards."""
        return [replace(sample, reward=self._futures.pop(sample.sample_id).result()) for sample in samples]

    def grading_metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """How the samples were graded, with the time-outs and errors since the last call."""
        graded = [sample.reward for sample in samples if sample.reward]
        return rewards.metrics.summarize(graded, self._grading.take_failures())

    def take_grading_failures(self) -> int:
        """Responses whose grading timed out or failed since the last call of this or of `grading_metrics`."""
        failures = self._grading.take_failures()
        return len(failures.timeouts) + len(failures.errors)

    def _sample(self, ask: Ask, generation: Generation) -> Sample:
        text = str(self._tokenizer.decode(list(generation.token_ids), skip_special_tokens=True))
        return to_sample(ask.prompt, ask.group_id, generation, text)

    def _submit(self, sample: Sample) -> Future[Reward]:
        spec = self._chooser.choose(sample.prompt)
        return self._grading.submit(
            sample.sample_id,
            spec.name,
            sample.response_text,
            sample.prompt.label,
            spec.options,
            facts=rewards.facts_of(sample),
        )
