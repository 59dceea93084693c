"""The engines and the graders as one, seen from the driver's thread."""

import asyncio
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self, TypeVar

import rewards.reward_metrics
from rewards.grading_pool import GradingPool
from rlpipe.data import PromptStream
from rlpipe.data.stream import StreamState
from rlpipe.generation.event_loop import BackgroundLoop
from rlpipe.generation.group_source import Batch, GroupSource, Responded
from rlpipe.generation.inputs import Inputs
from rlpipe.generation.length_history import LengthHistory, LengthState
from rlpipe.generation.prompt_requests import PromptRequest, requests_for_prompt
from rlpipe.monitoring.console import Console, TaskProgress
from rlpipe.monitoring.response_record import ResponseRecord, RolloutShape, measured_pace, tail_metrics
from rlpipe.monitoring.transcripts import Transcript, transcripts
from rlpipe.shared.errors import RlpipeError, RolloutError
from rlpipe.shared.interrupts import raise_if_requested
from rlpipe.shared.sample import Episode, Sample, Status, by_episode
from rollout.client import EngineClient
from rollout.dispatch import RoutingCounts
from rollout.partial_response import PartialResponse
from rollout.pool import RolloutPool
from rollout.requests import SamplingParameters

Result = TypeVar("Result")

_LOOK_EVERY_SECONDS = 0.2
_LOOKING_SHARE = 0.01  # of the driver's time, at most: a look counts all responses that are there
_ABORT_SECONDS = 30.0
_MOST_RECORDED_RESPONSES = 2**16  # of an iteration; more would make a large file that no report replays


class Rollouts:
    """Generates and grades in a thread of its own. `state` and `pending` say where the training prompts go on,
    `lengths` how long responses were so far.

    while_waiting: called again and again in the driver's thread while it waits for responses; there the actor is idle
    and has the weights that the engines sample with.
    """

    def __init__(
        self,
        pool: RolloutPool,
        grading: GradingPool,
        inputs: Inputs,
        console: Console,
        state: StreamState = StreamState(),
        pending: Sequence[int] = (),
        while_waiting: Callable[[], None] = lambda: None,
        lengths: LengthState | None = None,
    ) -> None:
        self._while_waiting = while_waiting
        config = inputs.config
        self._config = config
        self._pool = pool
        self._grading = grading
        self._inputs = inputs
        self._console = console
        self._sampling = {
            dataset.name: SamplingParameters.training(config.rollout, dataset.sampling) for dataset in config.data.train
        }
        self.prompts = PromptStream(inputs.training.prompts, config.seed, config.data.shuffle, state)
        self._pending = list(pending)
        self.lengths = LengthHistory(lengths)
        self._failures: list[str] = []
        self._loop = BackgroundLoop("rollouts")
        self._client: EngineClient = pool.client()
        inputs.episodes.open(self._client, inputs.tokenizer, config.seed)
        self._source = GroupSource(
            config.rollout,
            self._take_group,
            self._respond,
            self._grade,
            inputs.filters,
            lambda: inputs.episodes.interrupt(self._client.abort),
            last_iteration=config.run.iterations,
            is_stranded=lambda: not pool.serving(),
        )

    def take(self, iteration: int, version: int) -> Batch:
        """The graded samples of `iteration`, which will be trained by weights of `version`.

        Raises RolloutError when all groups were dropped, or too many samples or their grading failed, DeadlineError
        when late.
        """
        batch = self._wait(
            self._source.take(iteration, version), lambda: self._with_running(self._source.progress(iteration))
        )
        self._check_failures(batch.samples)
        batch = self._with_record(batch)
        for group in batch.lengths:
            self.lengths.note(group.prompt, group.lengths.tokens)
        if notes := self._inputs.episodes.take_notes():
            self._console.say(
                f"{len(notes)} times a context was rewritten, which opens a branch; the last: {notes[-1]}"
            )
        return replace(batch, metrics=batch.metrics | self._inputs.episodes.take_metrics())

    def wait_for_running(self) -> None:
        """Lets responses end that are not to see new weights. Call before the weights of the engines change."""
        self._wait(self._source.wait_for_running())

    def run(self, requests: Sequence[PromptRequest]) -> list[Sample]:
        """The samples of one episode for each of `requests`, in their order: graded, unless it failed.

        Raises RolloutError when grading failed for too many, DeadlineError when late.
        """
        there: list[Episode] = []

        async def one(request: PromptRequest) -> Episode:
            episode = (await self._respond(request, PartialResponse())).episode
            if episode is None:
                raise RolloutError(f"sample {request.sample_id} was interrupted, which no evaluation should be")
            if not _failed(episode):
                episode = await self._grade(episode)
            there.append(episode)
            return episode

        async def all_of_them() -> list[Sample]:
            return [sample for episode in await asyncio.gather(*map(one, requests)) for sample in episode]

        samples = self._wait(all_of_them(), lambda: self._with_running(_finished(there, len(requests))))
        self._check_grading(there)
        return samples

    def position(self) -> tuple[StreamState, tuple[int, ...]]:
        """What the next run's `state` and `pending` have to be for no prompt to be lost."""
        unfinished = self._wait(self._source.unfinished())
        return self.prompts.state, tuple(sorted([*unfinished, *self._pending]))

    def transcripts(self, samples: Sequence[Sample]) -> list[Transcript]:
        """Some of the episodes of several turns in `samples`, to be read again."""
        count = self._config.rollout.generate.transcripts_per_iteration
        return transcripts(samples, count, lambda ids: str(self._inputs.tokenizer.decode(list(ids))))

    def grading_metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """How the samples were graded, with the time-outs and errors since the last call."""
        graded = [episode[0].reward for episode in by_episode(samples) if episode[0].reward]
        return rewards.reward_metrics.summarize(graded, self._grading.take_failures())

    def take_grading_failures(self) -> int:
        """Responses whose grading timed out or failed since the last call of this or of `grading_metrics`."""
        failures = self._grading.take_failures()
        return len(failures.timeouts) + len(failures.errors)

    def take_routing(self) -> RoutingCounts:
        """Where turns of conversations went since the last call."""
        return self._client.take_routing()

    def interrupt(self) -> None:
        """Has the engines end what they are generating; nothing more can be taken. Raises DeadlineError when late."""
        try:
            self._loop.submit(self._client.abort()).result(_ABORT_SECONDS)
        except TimeoutError:
            raise self._pool.late(self._client, _ABORT_SECONDS) from None

    def close(self) -> None:
        """Ends what is in flight."""
        self._inputs.episodes.close()
        self._client.close()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(
        self, coroutine: Coroutine[Any, Any, Result], progress: Callable[[], TaskProgress] | None = None
    ) -> Result:
        """Its result, with the console told of its progress."""
        deadline = self._config.deadlines.rollout_seconds
        future: Future[Result] = self._loop.submit(coroutine)
        end = time.monotonic() + deadline
        next_look = 0.0
        while not future.done():
            raise_if_requested()
            if progress is not None:
                self._while_waiting()
                if (begin := time.monotonic()) >= next_look:
                    self._console.progress(progress())
                    next_look = begin + (time.monotonic() - begin) / _LOOKING_SHARE
            if time.monotonic() > end:
                future.cancel()
                raise self._pool.late(self._client, deadline)
            try:
                future.result(timeout=_LOOK_EVERY_SECONDS)
            except TimeoutError:
                continue
        return future.result()

    def _with_running(self, progress: TaskProgress) -> TaskProgress:
        """With what the engines have told of responses that are still being written."""
        lengths = self._client.running_lengths()
        return replace(
            progress,
            tokens=progress.tokens + sum(lengths),
            longest_tokens=max([progress.longest_tokens, *lengths]),
        )

    def _take_group(self) -> tuple[int, list[PromptRequest]]:
        number = self._pending.pop(0) if self._pending else None
        if number is None:
            number = self.prompts.number
            (prompt,) = self.prompts.take(1)
        else:
            prompt = self.prompts.item(number)
        sampling = self._sampling[prompt.dataset]
        samples, expected = self._config.rollout.samples_per_prompt, self.lengths.expected(prompt)
        return number, requests_for_prompt(f"{number:08d}", prompt, samples, sampling, expected)

    async def _respond(self, request: PromptRequest, partial: PartialResponse) -> Responded:
        try:
            return await self._inputs.episodes.make(request, partial)
        except RlpipeError:
            raise
        except Exception:  # a user's function: it costs its episode, is counted and told
            self._failures.append(f"sample {request.sample_id}: {traceback.format_exc()}")
            return Responded((failed_sample(request),))

    async def _grade(self, episode: Episode) -> Episode:
        """With the reward of the text that the policy wrote last in all its branches, unless it has one already."""
        sample = episode[-1]
        if sample.reward is not None:
            return episode
        spec = self._inputs.chooser.choose(sample.prompt)
        future = self._grading.submit(
            sample.sample_id,
            spec.name,
            sample.response_text,
            sample.prompt.label,
            spec.options,
            facts=rewards.facts_of(sample),
        )
        reward = await asyncio.wrap_future(future)
        return tuple(branch.changed(reward=reward) for branch in episode)

    def _with_record(self, batch: Batch) -> Batch:
        """In mode `sync`, where responses of one iteration alone are in flight, with what its tail cost."""
        spans, rollout = self._client.take_spans(), self._config.rollout
        if rollout.mode != "sync" or not batch.lengths:
            return batch
        shape = RolloutShape.of(rollout)
        groups = tuple(group.lengths for group in batch.lengths)
        pace = measured_pace(spans, shape.running)
        self._client.note_pace(pace)
        record = ResponseRecord(shape, batch.seconds, pace, groups)
        kept = record if record.responses <= _MOST_RECORDED_RESPONSES else None
        return replace(batch, record=kept, metrics=batch.metrics | tail_metrics(spans, shape))

    def _check_failures(self, samples: Sequence[Sample]) -> None:
        failures, self._failures = self._failures, []
        episodes = by_episode(samples)
        share = sum(map(_failed, episodes)) / len(episodes)
        if share > self._config.rollout.generate.max_failed_share:
            reason = f"; the last one: {failures[-1]}" if failures else ": they have no tokens"
            raise RolloutError(
                f"{share:.0%} of the samples failed, more than rollout.generate.max_failed_share = "
                f"{self._config.rollout.generate.max_failed_share:.0%}{reason}"
            )
        if failures:
            self._console.say(f"{len(failures)} samples failed; the last one: {failures[-1]}")
        self._check_grading(episodes)

    def _check_grading(self, episodes: Sequence[Episode]) -> None:
        rewards = [episode[-1].reward for episode in episodes]
        graded = [reward for reward in rewards if reward is not None]
        failed = [reward.reason for reward in graded if reward.failed]
        limit = self._config.reward.max_failed_share
        if len(failed) > limit * len(graded):
            raise RolloutError(
                f"{len(failed)} of {len(graded)} responses could not be graded, more than reward.max_failed_share = "
                f"{limit:.0%}; the last one: {failed[-1]}"
            )


def _failed(episode: Episode) -> bool:
    return all(sample.status is Status.FAILED for sample in episode)


def _finished(episodes: Sequence[Episode], wanted: int) -> TaskProgress:
    lengths = [len(sample.response_ids) for episode in episodes for sample in episode]
    return TaskProgress(len(episodes), wanted, sum(lengths), max(lengths, default=0))


def failed_sample(request: PromptRequest) -> Sample:
    """The place of a response that did not come about."""
    return Sample(
        sample_id=request.sample_id,
        group_id=request.group_id,
        prompt=request.prompt,
        response_ids=(),
        response_text="",
        rollout_logprobs=(),
        loss_mask=(),
        versions=(),
        status=Status.FAILED,
        engine=-1,
    )
