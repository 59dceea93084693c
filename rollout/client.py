"""Asking the engines, from one asyncio event loop."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray

from rlpipe.shared.errors import RlpipeError, RolloutError
from rlpipe.shared.sample import Status
from rollout.dispatch import Dispatcher
from rollout.requests import GenerateRequest, Generation


class EngineClient:
    """Sends each request to the engine with the fewest tokens in flight; requests made together travel together.

    `translate` makes one of our errors out of one of Ray's. The first error of an engine is the error of every request
    in flight and of all later ones.
    """

    def __init__(
        self,
        engines: Sequence[Any],
        requests_per_engine: int,
        translate: Callable[[ray.exceptions.RayError], RlpipeError],
    ) -> None:
        self._engines = tuple(engines)
        self._translate = translate
        self._dispatcher = Dispatcher(len(engines), requests_per_engine)
        self._requests: dict[str, GenerateRequest] = {}
        self._answers: dict[str, asyncio.Future[Generation]] = {}
        self._streams: set[asyncio.Task[None]] = set()
        self._failure: RlpipeError | None = None
        self._assigning = False

    async def generate(self, request: GenerateRequest) -> Generation:
        """The answer. Raises RolloutError for a request that no engine accepts, or when an engine dies."""
        if self._failure is not None:
            raise self._failure
        if request.request_id in self._answers:
            raise RolloutError(f"request {request.request_id!r} is not answered yet and cannot be made again")
        loop = asyncio.get_running_loop()
        self._requests[request.request_id] = request
        answer = self._answers[request.request_id] = loop.create_future()
        self._dispatcher.add(request)
        if not self._assigning:
            # Later in this turn of the loop, so that one remote call takes all requests made in it.
            self._assigning = True
            loop.call_soon(self._assign)
        return await answer

    async def abort(self) -> None:
        """Answers all requests now, with status ABORTED where they are not done. Returns when the engines are idle."""
        for request in self._dispatcher.take_waiting():
            partial = request.partial
            self._resolve(
                Generation(
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
            )
        try:
            await asyncio.gather(*(engine.abort.remote() for engine in self._engines))
        except ray.exceptions.RayError as error:
            self._fail(self._translate(error))
        await asyncio.gather(*self._streams)

    def busy_engines(self) -> list[int]:
        """Engines that owe an answer."""
        return self._dispatcher.busy_engines()

    def _assign(self) -> None:
        self._assigning = False
        for engine, batch in self._dispatcher.assign().items():
            task = asyncio.get_running_loop().create_task(self._stream(engine, batch))
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)

    async def _stream(self, engine: int, batch: list[GenerateRequest]) -> None:
        try:
            async for reference in self._engines[engine].generate.remote(batch):
                for generation in await reference:
                    self._dispatcher.finished(engine, self._requests[generation.request_id])
                    self._resolve(generation)
                self._assign()
        except ray.exceptions.RayError as error:
            self._fail(self._translate(error))

    def _resolve(self, generation: Generation) -> None:
        del self._requests[generation.request_id]
        answer = self._answers.pop(generation.request_id, None)
        if answer is not None and not answer.done():  # gone after a failure, done when who asked was cancelled
            answer.set_result(generation)

    def _fail(self, failure: RlpipeError) -> None:
        self._failure = self._failure or failure
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._failure)
        self._answers.clear()
