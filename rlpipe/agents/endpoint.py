"""The HTTP server that agents talk to: OpenAI's API on the loopback interface, one base URL for each episode."""

import hmac
import resource
import secrets
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import orjson
from aiohttp.web import Application, AppRunner, HTTPRequestEntityTooLarge, Request, Response, SockSite

from rlpipe.agents import anthropic_messages
from rlpipe.agents.agent_episode import AgentEpisode, Answer
from rlpipe.agents.chat_answers import (
    chat_answer,
    chat_events,
    completion_answer,
    completion_events,
    models_answer,
    refusal_answer,
)
from rlpipe.agents.chat_rendering import ChatRenderer
from rlpipe.agents.chat_requests import Wanted, chat_request, completion_request
from rlpipe.agents.refusal import Refusal

_LOOPBACK = "127.0.0.1"
_BACKLOG = 4096
_MOST_BODY_BYTES = 64 * 2**20
_STOP_SECONDS = 1.0
_JSON = "application/json"

Events = Callable[[Answer], Iterator[bytes]]
Whole = Callable[[Answer], dict[str, Any]]


class Endpoint:
    """Lives in the event loop that starts it. `url` and `key` are what an agent of an episode is given."""

    def __init__(self, renderer: ChatRenderer, model: str, counts: "Counter[str]") -> None:
        self.key = f"rlpipe-{secrets.token_urlsafe(24)}"
        self._renderer = renderer
        self._model = model
        self._counts = counts
        self._episodes: dict[str, AgentEpisode] = {}
        self._socket: socket.socket | None = None
        self._runner: AppRunner | None = None
        self._driver_seconds = 0.0

    async def start(self) -> None:
        """Listens on a port of the system's choice. Agents in this process and the endpoint have a file for each
        connection, so as many are allowed as may be."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind((_LOOPBACK, 0))
        self._runner = AppRunner(self._application(), access_log=None, shutdown_timeout=_STOP_SECONDS)
        await self._runner.setup()
        await SockSite(self._runner, self._socket, backlog=_BACKLOG).start()

    async def stop(self) -> None:
        """Ends all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._socket is not None:
            self._socket.close()

    def take_driver_seconds(self) -> float:
        """Seconds that requests took here since the last call, without waiting for engines."""
        seconds, self._driver_seconds = self._driver_seconds, 0.0
        return seconds

    def open_episode(self, episode: AgentEpisode) -> str:
        """The base URL, for OpenAI's clients, at which it is served until `close_episode`."""
        assert self._socket is not None
        name = secrets.token_urlsafe(16)
        self._episodes[name] = episode
        return f"http://{_LOOPBACK}:{self._socket.getsockname()[1]}/episodes/{name}/v1"

    def close_episode(self, url: str) -> None:
        """What its agent asks from now on is refused."""
        self._episodes.pop(url.removesuffix("/v1").rpartition("/")[2], None)

    def _application(self) -> Application:
        application, root = Application(client_max_size=_MOST_BODY_BYTES), "/episodes/{name}/v1"
        application.router.add_post(f"{root}/chat/completions", self._answering(self._chat))
        application.router.add_post(f"{root}/completions", self._answering(self._complete))
        application.router.add_post(f"{root}/messages", self._answering(self._anthropic))
        application.router.add_post(f"{root}/messages/count_tokens", self._answering(self._count_tokens))
        application.router.add_get(f"{root}/models", self._answering(self._models))
        application.router.add_route("*", f"{root}/{{rest:.*}}", self._answering(self._unknown))
        application.router.add_route("*", "/{rest:.*}", self._answering(self._unknown))
        return application

    def _answering(
        self, handler: Callable[[AgentEpisode, Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """With refusals as answers, and the driver's own seconds counted."""

        async def answer(request: Request) -> Response:
            begin = time.perf_counter()
            try:
                return await handler(self._episode_of(request), request)
            except Refusal as refusal:
                self._counts["refused_requests"] += 1
                body = anthropic_messages.refusal(refusal) if _is_anthropic(request) else refusal_answer(refusal)
                told = {"x-should-retry": "false"}
                return Response(body=orjson.dumps(body), status=refusal.status, headers=told, content_type=_JSON)
            finally:
                self._driver_seconds += time.perf_counter() - begin

        return answer

    def _episode_of(self, request: Request) -> AgentEpisode:
        given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="replace"), self.key.encode()):
            raise Refusal("the key is not the one of this run", status=401, code="invalid_api_key")
        episode = self._episodes.get(request.match_info.get("name", ""))
        if episode is None:
            raise Refusal("no episode is served here, or it is over", status=404, code="episode_over")
        return episode

    async def _chat(self, episode: AgentEpisode, request: Request) -> Response:
        wanted = chat_request(await _body(request), episode.reader)
        answer = await self._seen(episode, request, await episode.chat(wanted))
        arguments = (wanted.wanted, self._model, self._renderer)
        return _response(
            answer, wanted.wanted, lambda one: chat_answer(one, *arguments), lambda one: chat_events(one, *arguments)
        )

    async def _complete(self, episode: AgentEpisode, request: Request) -> Response:
        wanted = completion_request(await _body(request))
        answer = await self._seen(episode, request, await episode.complete(wanted))
        arguments = (wanted.wanted, self._model, self._renderer)
        return _response(
            answer,
            wanted.wanted,
            lambda one: completion_answer(one, *arguments),
            lambda one: completion_events(one, *arguments),
        )

    async def _anthropic(self, episode: AgentEpisode, request: Request) -> Response:
        wanted = chat_request(anthropic_messages.chat_body(await _body(request)), episode.reader)
        answer = await self._seen(episode, request, await episode.chat(wanted))
        return _response(
            answer,
            wanted.wanted,
            lambda one: anthropic_messages.answer(one, self._model),
            lambda one: anthropic_messages.events(one, self._model),
        )

    async def _count_tokens(self, episode: AgentEpisode, request: Request) -> Response:
        wanted = chat_request(anthropic_messages.chat_body(await _body(request)), episode.reader)
        counted = {"input_tokens": await episode.prompt_tokens(wanted)}
        return Response(body=orjson.dumps(counted), content_type=_JSON)

    async def _models(self, episode: AgentEpisode, request: Request) -> Response:
        return Response(body=orjson.dumps(models_answer(self._model, episode.limit_tokens)), content_type=_JSON)

    async def _unknown(self, episode: AgentEpisode, request: Request) -> Response:
        raise Refusal(f"{request.path[:200]} is not served", status=404, code="not_found")

    async def _seen(self, episode: AgentEpisode, request: Request, answer: Answer) -> Answer:
        """The answer, unless the agent has hung up, as clients do that will try again."""
        self._driver_seconds -= answer.waited_seconds
        if request.transport is None or request.transport.is_closing():
            episode.take_back(answer)
            raise Refusal("the agent has hung up", status=499, code="hung_up")
        return answer


def _is_anthropic(request: Request) -> bool:
    return "/v1/messages" in request.path


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.read())
    except HTTPRequestEntityTooLarge:
        problem = f"the request is larger than {_MOST_BODY_BYTES} bytes"
        raise Refusal(problem, status=413, code="request_too_large") from None
    except orjson.JSONDecodeError as error:
        raise Refusal(f"the request is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal("the request is no JSON object")
    return body


def _response(answer: Answer, wanted: Wanted, whole: Whole, events: Events) -> Response:
    if wanted.stream:
        return Response(body=b"".join(events(answer)), content_type="text/event-stream")
    return Response(body=orjson.dumps(whole(answer)), content_type=_JSON)
