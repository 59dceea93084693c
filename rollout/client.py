"""Asking the engines, from one asyncio event loop."""

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from rlpipe.shared.errors import EngineFailure, RlpipeError, RolloutError
from rlpipe.shared.sample import Status
from rollout.answer_check import why_unusable
from rollout.dispatch import Dispatcher, RoutingCounts
from rollout.engine_calls import translate
from rollout.fleet import EngineState, Fleet, RunningEngine
from rollout.migration import Pace, Running, expected_rest, worthwhile_moves
from rollout.partial_response import PartialResponse
from rollout.requests import GenerateRequest, Generation, ResponseSpan

_LOOK_SECONDS = 0.25
_ABORT_EVERY_SECONDS = 0.25
_LOOKING_SHARE = 0.05


class EngineClient:
    """Sends each request to the engine that its `Dispatcher` chooses; requests made together travel together.

    What a lost engine did not answer goes to others, or waits until one serves again. An error that no restart can
    cure, and the failure that no restart is left for, are the error of every request in flight and of all later ones.

    keep_tokens: responses of a lost engine go on from the tokens that it told; else they start again, which gives the
    same bits as if it had not been lost. follow_prefixes: requests go where their prefix is in the cache.
    longest_first: those that are expected to become longest go first. migrates: responses that are being written move
    to another engine where the last ones end sooner by that; `note_pace` says how fast engines are.
    """

    def __init__(
        self,
        fleet: Fleet,
        requests_per_engine: int,
        keep_tokens: bool,
        follow_prefixes: bool = True,
        longest_first: bool = True,
        migrates: bool = False,
    ) -> None:
        self._fleet = fleet
        self._keep_tokens = keep_tokens
        self._dispatcher = Dispatcher(len(fleet.all()), requests_per_engine, follow_prefixes, longest_first)
        self._requests: dict[str, GenerateRequest] = {}
        self._answers: dict[str, asyncio.Future[Generation]] = {}
        self._owners: dict[str, RunningEngine] = {}
        self._begins: dict[str, float] = {}
        self._spans: list[ResponseSpan] = []
        self._streams: dict[asyncio.Task[None], RunningEngine] = {}
        self._failure: RlpipeError | None = None
        self._migrates = migrates
        self._pace: Pace | None = None
        self._leaving: dict[str, int] = {}
        self._moved: dict[str, Generation] = {}
        self._look: asyncio.TimerHandle | None = None
        self._look_seconds = _LOOK_SECONDS
        self._assigning = False
        self._aborting = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def generate(self, request: GenerateRequest) -> Generation:
        """The answer. Raises RolloutError for a request that no engine accepts, or when no restart is left."""
        self._follow_fleet()
        if self._failure is not None:
            raise self._failure
        if request.request_id in self._answers:
            raise RolloutError(f"request {request.request_id!r} is not answered yet and cannot be made again")
        loop = asyncio.get_running_loop()
        self._requests[request.request_id] = request
        answer: asyncio.Future[Generation] = loop.create_future()
        self._answers[request.request_id] = answer
        self._dispatcher.add(request)
        self._assign_soon()
        return await answer

    async def abort(self) -> None:
        """Answers all requests now, with status ABORTED where they are not done. Returns when the engines are idle."""
        self._aborting = True
        for request in self._dispatcher.take_waiting():
            self._resolve(_aborted(request))
        self._end_streams_of_lost()
        owed = set(self._streams)
        while True:  # an engine may get this before what it was asked just now
            aborts = [self._follow(engine, self._abort(engine)) for engine in self._fleet.serving()]
            await asyncio.gather(*aborts, return_exceptions=True)  # those of lost engines are cancelled, as streams are
            if owed:
                _, owed = await asyncio.wait(owed, timeout=_ABORT_EVERY_SECONDS)
            if not owed:
                break
        self._aborting = False

    def busy_engines(self) -> list[int]:
        """Engines that owe an answer."""
        return self._dispatcher.busy_engines()

    def take_routing(self) -> RoutingCounts:
        """Of conversations, since the last call. From any thread."""
        return self._dispatcher.take_counts()

    def take_spans(self) -> list[ResponseSpan]:
        """Of the requests that were answered since the last call, urgent ones left out. From any thread."""
        spans, self._spans = self._spans, []
        return spans

    def note_pace(self, pace: Pace) -> None:
        """Of the engines lately, by which `migrates` goes. From any thread."""
        self._pace = pace

    def running_lengths(self) -> list[int]:
        """Tokens of each response that is still being written, as far as health probes have told. From any thread."""
        told = [owner.progress.get(name) for name, owner in list(self._owners.items())]
        return [len(partial.token_ids) for partial in told if partial is not None]

    def close(self) -> None:
        """The fleet forgets it; to be called from any thread once nothing is asked any more."""
        self._fleet.ignore(self._on_change)

    def _follow_fleet(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._fleet.listen(self._on_change)
            self._see_fleet()

    def _on_change(self) -> None:
        """In any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._see_fleet)

    def _see_fleet(self) -> None:
        """Take back what lost engines owe, and give it to those that serve."""
        if self._fleet.end is not None:
            self._fail(self._fleet.end)
            self._end_streams_of_lost()  # nobody ends these engines any more
            return
        for engine in set(self._owners.values()):
            if engine.state is EngineState.LOST:
                self._take_back(engine)
        self._assign()

    def _assign_soon(self) -> None:
        """Later in this turn of the loop, so that one remote call takes all that there is for an engine by then."""
        if not self._assigning:
            self._assigning = True
            asyncio.get_running_loop().call_soon(self._assign)

    def _assign(self) -> None:
        self._assigning = False
        with self._fleet.taking_requests() as engines:
            serving = {engine.index: engine for engine in engines}
            self._dispatcher.serve_by(serving)
            for index, batch in self._dispatcher.assign().items():
                engine = serving[index]
                engine.asked = True
                self._owners.update((request.request_id, engine) for request in batch)
                self._begins.update(dict.fromkeys((request.request_id for request in batch), time.perf_counter()))
                answers = engine.actor.generate.remote(batch)
                self._follow(engine, self._stream(engine, answers))

    def _follow(self, engine: RunningEngine, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """What waits for `engine`, until it is lost."""
        task = asyncio.get_running_loop().create_task(call)
        self._streams[task] = engine
        task.add_done_callback(self._streams.pop)
        return task

    async def _stream(self, engine: RunningEngine, answers: Any) -> None:
        try:
            async for reference in answers:
                for generation in await reference:
                    self._receive(engine, generation)
                if self._dispatcher.has_waiting:
                    self._assign_soon()
                elif self._migrates and self._look is None:
                    self._look = asyncio.get_running_loop().call_later(self._look_seconds, self._migrate)
        except ray.exceptions.RayError as error:
            self._note(engine, error)

    def _migrate(self) -> None:
        """Begin to move what is worth moving. Takes a twentieth of the loop's time at most, however much is running."""
        self._look = None
        if self._pace is None or self._aborting or self._dispatcher.has_waiting:
            return
        begin = time.perf_counter()
        with self._fleet.taking_requests() as engines:
            serving = {engine.index: engine for engine in engines}
        leaving: dict[int, list[str]] = {}
        for move in worthwhile_moves(self._running(serving), self._pace):
            self._leaving[move.name] = move.target
            leaving.setdefault(move.source, []).append(move.name)
        for index, names in leaving.items():
            self._follow(serving[index], self._release(serving[index], names))
        self._look_seconds = max(_LOOK_SECONDS, (time.perf_counter() - begin) / _LOOKING_SHARE)

    def _running(self, serving: Mapping[int, RunningEngine]) -> dict[int, list[Running]]:
        """What each engine writes, or will in a moment."""
        running: dict[int, list[Running]] = {index: [] for index in serving}
        for name, owner in self._owners.items():
            index = self._leaving.get(name, owner.index)
            if index in serving and serving.get(owner.index) is owner:
                request, told = self._requests[name], owner.progress.get(name)
                begun = len(request.partial.token_ids)
                written = begun if told is None else max(begun, len(told.token_ids))
                rest = expected_rest(request.expected_tokens, written - begun) or max(written, 1)
                left = min(rest, request.sampling.max_new_tokens - written)
                read = len(request.prompt_ids) + written
                stays = name in self._moved or name in self._leaving
                running[index].append(Running(name, left, read, stays))
        return running

    async def _release(self, engine: RunningEngine, names: Sequence[str]) -> None:
        """Has `engine` answer these requests as they are; they go on elsewhere, see `_receive`."""
        try:
            await engine.actor.release.remote(tuple(names))
        except ray.exceptions.RayError as error:
            self._note(engine, error)

    async def _abort(self, engine: RunningEngine) -> None:
        try:
            await engine.actor.abort.remote()
        except ray.exceptions.RayError as error:
            self._note(engine, error)

    def _note(self, engine: RunningEngine, error: ray.exceptions.RayError) -> None:
        """An engine's call failed: the engine is lost, or the request was wrong."""
        failure = translate(engine, error)
        if isinstance(failure, EngineFailure):
            self._fleet.report(engine, failure)
            self._see_fleet()
        else:
            self._fail(failure)

    def _receive(self, engine: RunningEngine, generation: Generation) -> None:
        request = self._requests.get(generation.request_id)
        if request is None or self._owners.get(generation.request_id) is not engine:
            return  # taken back from an engine that was given up, and asked of another
        reason = why_unusable(request, generation)
        if reason is not None:
            self._fleet.counts.add(answers_refused=1)
            failure = f"engine {engine.index} answered request {request.request_id!r} with {reason}"
            self._fleet.report(engine, EngineFailure(f"{failure}; log: {engine.setup.log_path}"))
            self._see_fleet()
            return
        self._fleet.note_answer(engine)
        self._note_span(request, generation)
        target = self._leaving.pop(request.request_id, None)
        if target is not None and generation.status is Status.ABORTED and not self._aborting:
            self._hand_over(engine, request, generation, target)
            return
        self._dispatcher.finished(engine.index, request)
        self._resolve(generation)

    def _hand_over(self, engine: RunningEngine, request: GenerateRequest, written: Generation, target: int) -> None:
        """What `engine` has ended early goes on at `target`."""
        self._moved[request.request_id] = written
        self._requests[request.request_id] = request = replace(request, partial=written.partial)
        del self._owners[request.request_id]
        self._dispatcher.move(engine.index, request, target)
        self._assign_soon()

    def _note_span(self, request: GenerateRequest, generation: Generation) -> None:
        if not request.urgent:
            tokens = len(generation.token_ids) - len(request.partial.token_ids)
            begin, end = self._begins[request.request_id], time.perf_counter()
            response = request.conversation_id or request.request_id
            self._spans.append(ResponseSpan(response, generation.engine, begin, end, tokens))

    def _take_back(self, engine: RunningEngine) -> None:
        """Requests that a lost engine owes are made again; while everything is aborted they are answered so."""
        owed = [self._requests[name] for name, owner in self._owners.items() if owner is engine]
        again = [replace(request, partial=self._kept(engine, request)) for request in owed]
        self._dispatcher.put_back(engine.index, again)
        lost = 0
        for request in again:
            told = engine.progress.get(request.request_id, PartialResponse())
            lost += max(0, len(told.token_ids) - len(request.partial.token_ids))
            self._requests[request.request_id] = request
            del self._owners[request.request_id]
            self._leaving.pop(request.request_id, None)
        self._fleet.counts.add(requests_reissued=len(again), tokens_lost=lost)
        self._end_streams_of_lost()
        if self._aborting:
            for request in self._dispatcher.take_waiting():
                self._resolve(_aborted(request))

    def _end_streams_of_lost(self) -> None:
        """They may never end by themselves."""
        for task, owner in list(self._streams.items()):
            if owner.is_lost and task is not asyncio.current_task():
                task.cancel()

    def _kept(self, engine: RunningEngine, request: GenerateRequest) -> PartialResponse:
        """From where the response goes on. A stop string may lie across the interruption (see `interrupted`)."""
        told = engine.progress.get(request.request_id)
        if told is None or not self._keep_tokens:
            return request.partial
        kept = told.shortened(max(map(len, request.sampling.stop), default=0))
        return kept if len(kept.token_ids) > len(request.partial.token_ids) else request.partial

    def _resolve(self, generation: Generation) -> None:
        del self._requests[generation.request_id]
        self._owners.pop(generation.request_id, None)
        self._begins.pop(generation.request_id, None)
        if (before := self._moved.pop(generation.request_id, None)) is not None:
            generation = generation.with_work_of(before)
        answer = self._answers.pop(generation.request_id, None)
        if answer is not None and not answer.done():  # gone after a failure, done when who asked was cancelled
            answer.set_result(generation)

    def _fail(self, failure: RlpipeError) -> None:
        self._failure = self._failure or failure
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._failure)
        self._answers.clear()


def _aborted(request: GenerateRequest) -> Generation:
    partial = request.partial
    return Generation(
        request_id=request.request_id,
        token_ids=partial.token_ids,
        logprobs=partial.logprobs,
        status=Status.ABORTED,
        versions=partial.versions,
        engine=-1,
        seconds=0.0,
        retractions=0,
        routes=partial.routes,
    )
