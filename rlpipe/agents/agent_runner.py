"""Running someone's agent: an `async def` function, a plain function in a thread, or a program."""

import asyncio
import inspect
import json
import os
import shutil
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from rlpipe.agents.agent_task import REPORTED, AgentFailure, AgentTask
from rlpipe.config.agents import AgentConfig
from rlpipe.generation.event_loop import BackgroundLoop
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.named_function import call_problem, named_function

_PLACE = "rollout.generate.agent.run"
_TERM_SECONDS = 5.0
_KEPT_OUTPUT_BYTES = 64 * 1024
_SHOWN_CHARACTERS = 2000


class AgentRunner(Protocol):
    """Runs agents side by side. Cancelling a run ends its agent."""

    async def run(self, task: AgentTask) -> Any:
        """What the agent gave back. Raises whatever it raised, or AgentFailure."""

    def close(self) -> None:
        """Ends all agents that can be ended."""


def agent_runner(settings: AgentConfig) -> Callable[[], AgentRunner]:
    """What starts a runner of the agent that `settings` name. Raises ConfigError for one that cannot be called."""
    if settings.run is None:
        if shutil.which(settings.command[0]) is None:
            raise ConfigError(
                f"rollout.generate.agent.command: {settings.command[0]!r} is no program that can be run here; give its "
                "path, or a name that PATH knows"
            )
        return partial(CommandRunner, tuple(settings.command))
    function = named_function(settings.run, {}, _PLACE)
    if problem := call_problem(function, None, **settings.options):
        raise ConfigError(
            f"{_PLACE} {settings.run!r} does not take (task, **options) with the options {sorted(settings.options)}: "
            f"{problem}"
        )
    bound = partial(function, **settings.options)
    if inspect.iscoroutinefunction(function):
        return partial(CoroutineRunner, bound)
    return partial(ThreadRunner, bound)


class CoroutineRunner:
    """In an event loop of its own: an agent that blocks it keeps other agents waiting, and not the endpoint."""

    def __init__(self, function: Callable[[AgentTask], Awaitable[Any]]) -> None:
        self._function = function
        self._loop = BackgroundLoop("agents")

    async def run(self, task: AgentTask) -> Any:
        return await asyncio.wrap_future(self._loop.submit(self._call(task)))

    def close(self) -> None:
        with suppress(TimeoutError):  # an agent blocks the loop; its thread ends with the process
            self._loop.close()

    async def _call(self, task: AgentTask) -> Any:
        return await self._function(task)


class ThreadRunner:
    """A thread for each agent. Nothing can end it from outside: the next request of a cancelled one is refused, and
    one that asks nothing any more ends with the process."""

    def __init__(self, function: Callable[[AgentTask], Any]) -> None:
        self._function = function

    async def run(self, task: AgentTask) -> Any:
        done: Future[Any] = Future()
        threading.Thread(target=self._work, args=(task, done), name=f"agent {task.episode_id}", daemon=True).start()
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        return

    def _work(self, task: AgentTask, done: "Future[Any]") -> None:
        try:
            result = self._function(task)
        except BaseException as error:  # whatever ends someone else's program; it is told where it is waited for
            with suppress(InvalidStateError):
                done.set_exception(error)
        else:
            with suppress(InvalidStateError):  # it was cancelled
                done.set_result(result)


class CommandRunner:
    """A process group for each agent. The last line of its output may be its report, as a JSON object."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command
        self._running: set[int] = set()

    async def run(self, task: AgentTask) -> Any:
        process = await self._start(task)
        self._running.add(process.pid)
        try:
            written = json.dumps(task.as_json(), default=str).encode() + b"\n"
            output, errors, _ = await asyncio.gather(
                _tail(process.stdout), _tail(process.stderr), _feed(process.stdin, written)
            )
            code = await process.wait()
        finally:
            await _end(process)
            self._running.discard(process.pid)
        if code != 0:
            told = (errors or output).decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]
            raise AgentFailure(f"{self._command[0]} ended with exit code {code}: {told or '(no output)'}")
        return _last_line_report(output)

    def close(self) -> None:
        for pid in list(self._running):
            _signal_group(pid, signal.SIGKILL)

    async def _start(self, task: AgentTask) -> asyncio.subprocess.Process:
        endpoint = {"OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key, "OPENAI_MODEL": task.model}
        anthropic = {
            "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": task.api_key,
            "ANTHROPIC_MODEL": task.model,
        }
        try:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **endpoint, **anthropic},
                start_new_session=True,
            )
        except OSError as error:
            raise AgentFailure(f"{self._command[0]} cannot be started: {error}") from None


async def _tail(stream: asyncio.StreamReader | None) -> bytes:
    """All is read, and the end of it kept."""
    kept = b""
    while stream is not None and (read := await stream.read(_KEPT_OUTPUT_BYTES)):
        kept = (kept + read)[-_KEPT_OUTPUT_BYTES:]
    return kept


async def _feed(stream: asyncio.StreamWriter | None, data: bytes) -> None:
    if stream is None:
        return
    with suppress(ConnectionError):  # it need not read its task
        stream.write(data)
        await stream.drain()
        stream.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """The whole group: what an agent started ends with it."""
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _TERM_SECONDS)
    _signal_group(process.pid, signal.SIGKILL)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def _last_line_report(output: bytes) -> Mapping[str, Any] | None:
    lines = output.decode(errors="replace").strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        return None
    try:
        report = json.loads(lines[-1])
    except ValueError:
        return None
    known = isinstance(report, dict) and report.keys() & REPORTED
    return report if known else None
