"""Episodes made by agents: each gets a place at the endpoint, is run, timed and ended, and becomes samples."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.agents.agent_episode import AgentEpisode
from rlpipe.agents.agent_runner import AgentRunner, agent_runner
from rlpipe.agents.agent_task import AgentFailure, AgentTask, Report, report_of
from rlpipe.agents.chat_rendering import ChatRenderer
from rlpipe.agents.endpoint import Endpoint
from rlpipe.config.root import Config
from rlpipe.generation.conversation import Generator
from rlpipe.generation.group_source import Responded
from rlpipe.generation.prompt_requests import PromptRequest
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.sample import Episode, Reward
from rollout.partial_response import PartialResponse
from rollout.requests import sample_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CLOSE_SECONDS = 30.0
COUNTS = (
    *("requests", "continued_requests", "divergences", "refused_requests", "context_overflows"),
    *("overridden_sampling", "abandoned_responses", "special_text_requests", "tool_calls", "malformed_tool_calls"),
    *("unenforced_formats", "unfit_responses", "failures", "timeouts", "interruptions"),
)
"""What is counted, by its metric `agent/..._count`."""


@dataclass
class _Running:
    """An agent at work. `left_seconds` of its time limit."""

    episode: AgentEpisode
    url: str
    agent: "asyncio.Task[Any]"
    left_seconds: float


class AgentMaker:
    """An EpisodeMaker of `rollout.generate.agent`.

    An agent whose episode is interrupted stays alive where `rollout.partial` has it go on later; its requests wait.
    """

    def __init__(self, config: Config) -> None:
        if config.rollout.generate.agent is None:
            raise ConfigError("rollout.generate.agent is empty: say how your agent is run")
        self._settings = config.rollout.generate.agent
        self._start_runner = agent_runner(self._settings)
        self._columns = {one.name: one.prompt_column for one in (*config.data.train, *config.eval.datasets)}
        self._template_arguments = config.data.chat_template_arguments
        self._max_prompt_tokens = config.data.max_prompt_tokens
        self._keeps_interrupted = config.rollout.partial
        self._model = Path(config.model.path).name
        self._counts: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self._notes: list[str] = []

    def open(self, engines: Generator, tokenizer: "PreTrainedTokenizerBase", run_seed: int) -> None:
        self._engines, self._run_seed = engines, run_seed
        self._renderer = ChatRenderer(tokenizer, self._template_arguments)
        self._runner: AgentRunner = self._start_runner()
        self._endpoint: asyncio.Task[Endpoint] | None = None
        self._places = asyncio.Semaphore(self._settings.concurrency)
        self._interruptions = 0
        self._running: dict[str, _Running] = {}
        self._suspended: dict[str, _Running] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def make(self, request: PromptRequest, partial: PartialResponse) -> Responded:
        suspended = self._suspended.pop(request.sample_id, None)
        if suspended is not None and partial.token_ids:
            suspended.episode.resume()
            return await self._attend(request, suspended)
        if suspended is not None:
            await self._end(suspended)
        interruptions = self._interruptions
        async with self._places:
            if interruptions != self._interruptions:
                return Responded(None)  # while it waited for its place
            return await self._attend(request, await self._start(request))

    async def interrupt(self, abort: Callable[[], Awaitable[None]]) -> None:
        """Running episodes are interrupted now, wherever their agents are; those that wait do not begin."""
        self._interruptions += 1
        episodes = [running.episode for running in self._running.values()]
        for episode in episodes:
            episode.hold()
        await abort()
        for episode in episodes:
            episode.suspend()

    def take_metrics(self) -> dict[str, float]:
        now = Counter(self._counts)
        counts, self._told = now - self._told, now
        requests = counts["requests"]
        metrics = {f"agent/{name}_count": float(counts[name]) for name in COUNTS}
        if self._endpoint is not None and requests:
            endpoint = self._endpoint.result()
            metrics["agent/driver_mean_seconds"] = endpoint.take_driver_seconds() / requests
        return metrics

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        self._runner.close()
        if self._endpoint is not None and self._loop is not None:
            stopping = asyncio.run_coroutine_threadsafe(self._close_in_loop(), self._loop)
            stopping.result(_CLOSE_SECONDS)
        self._endpoint = None

    async def _close_in_loop(self) -> None:
        running = [*self._running.values(), *self._suspended.values()]
        await asyncio.gather(*map(self._end, running), return_exceptions=True)
        self._running.clear()
        self._suspended.clear()
        assert self._endpoint is not None
        await (await self._endpoint).stop()

    async def _serve(self) -> Endpoint:
        endpoint = Endpoint(self._renderer, self._model, self._counts)
        await endpoint.start()
        return endpoint

    async def _start(self, request: PromptRequest) -> _Running:
        if self._endpoint is None:
            self._loop = asyncio.get_running_loop()
            self._endpoint = asyncio.create_task(self._serve())
        endpoint = await self._endpoint
        limit = self._max_prompt_tokens + request.sampling.max_new_tokens
        formats = self._settings.response_format
        episode = AgentEpisode(request, self._engines, self._renderer, self._run_seed, limit, self._counts, formats)
        url = endpoint.open_episode(episode)
        agent = asyncio.create_task(self._runner.run(self._task(request, url, endpoint.key)))
        return _Running(episode, url, agent, self._settings.timeout_seconds)

    def _task(self, request: PromptRequest, url: str, key: str) -> AgentTask:
        prompt, metadata = request.prompt, dict(request.prompt.metadata)
        return AgentTask(
            base_url=url,
            api_key=key,
            model=self._model,
            prompt=metadata.pop(self._columns[prompt.dataset], prompt.text),
            label=prompt.label,
            metadata=metadata,
            episode_id=request.sample_id,
            seed=sample_seed(self._run_seed, request.sample_id),
        )

    async def _attend(self, request: PromptRequest, running: _Running) -> Responded:
        """Until the agent has ended, its time is up, or its episode is interrupted."""
        episode = running.episode
        self._running[request.sample_id] = running
        begin = time.perf_counter()
        interrupted = asyncio.create_task(episode.interrupted.wait())
        try:
            await asyncio.wait(
                {running.agent, interrupted}, timeout=running.left_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            running.left_seconds -= time.perf_counter() - begin
            if episode.error is not None:
                raise episode.error
            if episode.interrupted.is_set() and not running.agent.done():
                return self._interrupted(request, running)
            if not running.agent.done():
                self._counts["timeouts"] += 1
            return Responded(self._episode(running))
        finally:
            interrupted.cancel()
            self._running.pop(request.sample_id, None)
            if request.sample_id not in self._suspended:
                await self._end(running)

    def _interrupted(self, request: PromptRequest, running: _Running) -> Responded:
        self._counts["interruptions"] += 1
        if not self._keeps_interrupted:
            return Responded(None)
        self._suspended[request.sample_id] = running
        return Responded(None, running.episode.written)

    def _episode(self, running: _Running) -> Episode:
        """The samples, with the agent's report. Raises what the agent raised, unless that has a reward, too."""
        try:
            report = self._report(running)
        except Exception as error:  # an agent is a program of someone else, and may raise anything
            self._counts["failures"] += 1
            if self._settings.failure_reward is None or not running.episode.has_sampled:
                raise
            reason = f"the agent failed: {type(error).__name__}: {str(error)[:200]}"
            report = Report(Reward(self._settings.failure_reward, False, reason))
        self._notes += [f"episode {running.episode.request.sample_id}: {one}" for one in running.episode.divergences]
        *others, last = running.episode.samples()
        if report.answer is not None:
            last = replace(last, response_text=report.answer)
        return tuple(replace(sample, reward=report.reward) for sample in (*others, last))

    def _report(self, running: _Running) -> Report:
        if not running.agent.done():
            raise AgentFailure(f"the agent took longer than {self._settings.timeout_seconds:g} seconds")
        report = report_of(running.agent.result())
        if not running.episode.has_sampled:
            raise AgentFailure("the agent has asked the policy nothing")
        try:
            earned = running.episode.reward_turns(report.turn_rewards)
        except KeyError as error:
            raise AgentFailure(f"the agent's turn_rewards name {error}, which is the id of no answer it got") from None
        if report.reward is None:
            return report
        return replace(report, reward=replace(report.reward, score=report.reward.score + earned))

    async def _end(self, running: _Running) -> None:
        """Of agent and episode; later requests are refused."""
        running.episode.close()
        if self._endpoint is not None:
            (await self._endpoint).close_episode(running.url)
        if not running.agent.done():
            running.agent.cancel()
        await asyncio.wait({running.agent})
        if not running.agent.cancelled():
            running.agent.exception()  # it is told already, or nobody waits for it any more
