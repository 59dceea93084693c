"""Where batches of graded groups come from: groups in flight, filters, replacement, interruption."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from rlpipe.config.rollout import RolloutConfig
from rlpipe.generation.filters import GroupFilter, drop_reason
from rlpipe.generation.meter import GradingMeter
from rlpipe.generation.prompt_requests import PromptRequest
from rlpipe.monitoring.console import TaskProgress
from rlpipe.monitoring.response_record import GroupLengths, ResponseRecord
from rlpipe.shared.errors import RolloutError
from rlpipe.shared.sample import Episode, Prompt, Status
from rlpipe.shared.sample_table import SampleTable
from rollout.partial_response import PartialResponse


@dataclass(frozen=True)
class Responded:
    """What became of a request: an episode that may be graded already, or, where the engines were told to abort, none
    and a partial response."""

    episode: Episode | None
    partial: PartialResponse = PartialResponse()


_LOOK_SECONDS = 0.2

Respond = Callable[[PromptRequest, PartialResponse], Awaitable[Responded]]
Grade = Callable[[Episode], Awaitable[Episode]]
TakeGroup = Callable[[], tuple[int, list[PromptRequest]]]


@dataclass
class Group:
    """The requests to one prompt and their episodes so far, with the tokens that the policy wrote in each. `number`
    counts prompts since the run began. `spare`: more were begun than an iteration needs, and this is one of the rest.
    """

    number: int
    requests: list[PromptRequest]
    spare: bool = False
    episodes: dict[str, Episode] = field(default_factory=dict)
    partial: dict[str, PartialResponse] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def missing(self) -> list[PromptRequest]:
        return [request for request in self.requests if request.sample_id not in self.episodes]

    @cached_property
    def samples(self) -> SampleTable:
        """Of a group that misses none."""
        return SampleTable.of([one for request in self.requests for one in self.episodes[request.sample_id]])

    def written(self) -> "WrittenGroup":
        """Of a group that misses none."""
        first, tokens = self.requests[0], [self.tokens[one.sample_id] for one in self.requests]
        return WrittenGroup(self.number, first.prompt, GroupLengths(tuple(tokens), first.expected_tokens))

    @property
    def oldest_version(self) -> int | None:
        """Of the weights that sampled the oldest token; None where there is none yet."""
        spans = [span for episode in self.episodes.values() for sample in episode for span in sample.versions]
        spans += [span for partial in self.partial.values() for span in partial.versions]
        return min((span.version for span in spans), default=None)


@dataclass
class _Quota:
    """The groups of one iteration, or of all where they are handed out as they finish."""

    wanted: int = 0
    started: int = 0
    in_flight: int = 0
    handed_out: int = 0
    given_up: int = 0
    finished: list[Group] = field(default_factory=list)

    @property
    def held(self) -> int:
        return self.in_flight + len(self.finished) + self.handed_out + self.given_up


@dataclass(frozen=True)
class WrittenGroup:
    """A group whose responses are whole, graded or not."""

    number: int
    prompt: Prompt
    lengths: GroupLengths


@dataclass(frozen=True)
class Batch:
    """The samples of one iteration, group by group, and what it took to get them.

    `grading_seconds` is the time in which all that was waited for were graders. `tokens` are those that the engines
    generated, dropped ones included, in the `seconds` that were given to it. `lengths` are of all groups that were
    written to their end meanwhile, dropped ones included, in the order of their prompts; `record` is what a replay of
    them needs, where all were there at once.
    """

    samples: SampleTable
    grading_seconds: float
    seconds: float
    tokens: int
    metrics: dict[str, float]
    lengths: list[WrittenGroup] = field(default_factory=list)
    record: ResponseRecord | None = None


class GroupSource:
    """Keeps as many groups in flight as `RolloutConfig` wants, and hands out the finished ones, an iteration at a time.

    Lives in one event loop. Without oversampling and in the modes `sync` and `one_step_off`, what an iteration
    consists of depends on the groups' contents alone, and not on the order in which they finish: each dropped group is
    replaced by that of the next prompt.
    """

    def __init__(
        self,
        config: RolloutConfig,
        take_group: TakeGroup,
        respond: Respond,
        grade: Grade,
        filters: Sequence[GroupFilter],
        abort: Callable[[], Awaitable[None]],
        last_iteration: int,
        is_stranded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_stranded = is_stranded
        self._broken: list[Group] = []
        self._config = config
        self._last_iteration = last_iteration
        self._take_group = take_group
        self._respond = respond
        self._grade = grade
        self._filters = filters
        self._abort = abort
        self._in_order = config.mode != "async"
        self._quotas: dict[int, _Quota] = {}
        self._opened = 0
        self._waiting: list[Group] = []
        self._tasks: dict[asyncio.Task[None], Group] = {}
        self._aborting = False
        self._version = 0
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._counts: Counter[str] = Counter()
        self._tokens = 0
        self._written: list[WrittenGroup] = []
        self._meter = GradingMeter()
        self._last_end: float | None = None

    async def take(self, iteration: int, version: int) -> Batch:
        """The groups of `iteration`, which will be trained by weights of `version`.

        Raises RolloutError when every group was dropped, and the first error of an engine.
        """
        start = time.perf_counter()
        if self._error is not None:
            raise self._error
        self._version = version
        self._meter.restart()
        furthest = min(iteration + self._config.iterations_ahead, self._last_iteration)
        for number in range(max(self._opened + 1, iteration), furthest + 1):
            self._open(number)
        quota = self._quotas[self._key(iteration)]
        self._drop_stale(quota)
        wanted = self._config.prompts_per_iteration
        while len(quota.finished) < wanted and quota.in_flight:
            self._changed.clear()
            await self._changed.wait()
            if self._error is not None:
                raise self._error
        if self._in_order and quota.in_flight:
            await self._abort_rest(quota)
        return self._hand_out(iteration, quota, start)

    async def wait_for_running(self) -> None:
        """Returns when no group is in flight, in the mode whose responses finish before the weights change.

        Where all engines are lost there is none that could finish them: what is missing begins under the new weights.
        """
        while self._config.mode == "one_step_off" and self._tasks and not self._is_stranded():
            await asyncio.wait(list(self._tasks), timeout=_LOOK_SECONDS)  # a dropped group begins another
        if self._error is not None:
            raise self._error

    async def unfinished(self) -> list[int]:
        """Numbers of the prompts that were taken and are in no batch that was handed out, each once."""
        finished = (group for quota in self._quotas.values() for group in quota.finished)
        groups = [*self._waiting, *self._broken, *self._tasks.values(), *finished]
        # A group that has just ended is among the tasks until the event loop goes on.
        return sorted({group.number for group in groups})

    def progress(self, iteration: int) -> TaskProgress:
        """Episodes of `iteration` that are there, and wanted. To be called from any thread, for display."""
        quota = self._quotas.get(self._key(iteration))
        finished = [] if quota is None else list(quota.finished)
        groups = {group.number: group for group in [*finished, *list(self._tasks.values())]}.values()
        wanted = self._config.prompts_per_iteration * self._config.samples_per_prompt
        episodes = [episode for group in groups for episode in list(group.episodes.values())]
        lengths = [len(sample.response_ids) for episode in episodes for sample in episode]
        return TaskProgress(min(len(episodes), wanted), wanted, sum(lengths), max(lengths, default=0))

    def _key(self, iteration: int) -> int:
        return iteration if self._in_order else 0

    def _open(self, iteration: int) -> None:
        """Begin the groups of `iteration`; those that wait to go on come first. What oversampling begins beyond the
        wanted ones gets the room that these leave: in one order with them, the shortest would never be begun."""
        self._opened = iteration
        quota = self._quotas.setdefault(self._key(iteration), _Quota())
        quota.wanted += self._config.prompts_per_iteration
        for place in range(math.ceil(self._config.prompts_per_iteration * self._config.oversampling)):
            spare = place >= self._config.prompts_per_iteration
            if self._waiting:
                self._go_on(self._waiting.pop(0), quota, spare)
            else:
                self._begin(quota, spare)

    def _begin(self, quota: _Quota, spare: bool = False) -> None:
        number, requests = self._take_group()
        quota.started += 1
        self._counts["groups_started"] += 1
        self._start(Group(number, requests, spare), quota)

    def _go_on(self, group: Group, quota: _Quota, spare: bool) -> None:
        oldest = group.oldest_version
        if oldest is not None and self._version - oldest > self._config.max_staleness:
            self._counts["samples_restarted"] += len(group.requests)
            group = Group(group.number, group.requests)
        group.spare = spare
        self._counts["samples_continued"] += len(group.partial)
        quota.started += 1
        self._start(group, quota)

    def _start(self, group: Group, quota: _Quota) -> None:
        quota.in_flight += 1
        task = asyncio.get_running_loop().create_task(self._run(group, quota))
        self._tasks[task] = group
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        group = self._tasks.pop(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
            self._broken.append(group)
        self._changed.set()

    async def _run(self, group: Group, quota: _Quota) -> None:
        partial, group.partial = group.partial, {}
        await asyncio.gather(
            *(self._one(group, request, partial.get(request.sample_id, PartialResponse())) for request in group.missing)
        )
        quota.in_flight -= 1
        if group.missing:
            self._keep_or_drop(group)
            return
        self._written.append(group.written())
        reason = drop_reason(group.samples, self._filters) or self._stale(group)
        if reason is None:
            quota.finished.append(group)
        else:
            self._counts[f"groups_dropped_{reason}"] += 1
            self._replace(quota)

    async def _one(self, group: Group, request: PromptRequest, partial: PartialResponse) -> None:
        with self._meter.generating():
            responded = await self._respond(replace(request, spare=group.spare), partial)
        episode = responded.episode
        if episode is None:
            group.partial[request.sample_id] = responded.partial
            self._tokens += len(responded.partial.token_ids) - len(partial.token_ids)
            return
        tokens = sum(sample.trained_tokens for sample in episode)
        group.tokens[request.sample_id] = tokens
        self._tokens += tokens - len(partial.token_ids)
        if all(sample.status is Status.FAILED for sample in episode):
            self._counts["failed"] += 1
            group.episodes[request.sample_id] = episode
        else:
            group.episodes[request.sample_id] = await self._grade(episode)

    def _replace(self, quota: _Quota) -> None:
        """Begin groups until enough are in flight or finished, as far as `max_groups_factor` allows."""
        while quota.held < quota.wanted and not self._aborting:
            if quota.started >= quota.wanted * self._config.max_groups_factor:
                quota.given_up += 1
                self._counts["missing_groups"] += 1
            else:
                self._begin(quota)

    async def _abort_rest(self, quota: _Quota) -> None:
        """End what is still running; the groups that are complete already are as good as the others."""
        self._aborting = True
        rest = list(self._tasks)
        await self._abort()
        await asyncio.wait(rest)
        self._aborting = False
        if self._error is not None:
            raise self._error

    def _keep_or_drop(self, group: Group) -> None:
        if self._config.partial:
            self._counts["groups_carried"] += 1
            self._waiting.append(group)
        else:
            self._counts["groups_dropped_aborted"] += 1

    def _drop_stale(self, quota: _Quota) -> None:
        fresh = [group for group in quota.finished if self._stale(group) is None]
        self._counts["groups_dropped_stale"] += len(quota.finished) - len(fresh)
        quota.finished[:] = fresh
        self._replace(quota)

    def _stale(self, group: Group) -> str | None:
        oldest = group.oldest_version
        return None if oldest is None or self._version - oldest <= self._config.max_staleness else "stale"

    def _hand_out(self, iteration: int, quota: _Quota, start: float) -> Batch:
        wanted = self._config.prompts_per_iteration
        taken = quota.finished[:wanted]
        del quota.finished[:wanted]
        quota.handed_out += len(taken)
        if self._in_order:
            # Groups of an oversampled iteration that finished while the others were aborted.
            for group in quota.finished:
                self._keep_or_drop(group)
            del self._quotas[iteration]
        counts, self._counts = self._counts, Counter()
        if not taken:
            raise RolloutError(
                f"iteration {iteration}: all {counts['groups_started']} groups were dropped ({dict(counts)}); loosen "
                "rollout.filters, or look at the samples and the reward"
            )
        taken.sort(key=lambda group: group.number)
        end = time.perf_counter()
        begin = start if self._config.iterations_ahead == 0 or self._last_end is None else self._last_end
        self._last_end = end
        tokens, self._tokens = self._tokens, 0
        written, self._written = self._written, []
        return Batch(
            samples=SampleTable.joined([group.samples for group in taken]),
            grading_seconds=self._meter.take(),
            seconds=end - begin,
            tokens=tokens,
            metrics={f"rollout/{name}_count": float(count) for name, count in counts.items() if count},
            lengths=sorted(written, key=lambda group: group.number),
        )
