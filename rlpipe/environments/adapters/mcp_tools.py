"""Tools of an MCP server that is started for each episode and spoken to over its standard streams.

The row's prompt says what is to be done; turns with calls are answered by the server, one without is the answer, which
a grader of the run judges.
"""

import asyncio
import contextlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from rlpipe.environments.protocol import Message, Observation, Task
from rlpipe.environments.tool_task import ToolTask
from rlpipe.environments.tools import Tool
from rlpipe.shared.errors import ConfigError


class McpTools(ToolTask):
    """`command` starts the server, `environment` are further variables for it; it gets few of ours.

    `question`: a column whose text is asked in place of the row's prompt, so that the chat template can show the tools
    to the policy. `only`: names of the tools that it may see; all by default.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] = {},
        question: str | None = None,
        system: str = "",
        only: Sequence[str] = (),
    ) -> None:
        if not command:
            raise ConfigError("environment 'mcp': command is empty; give the server's program and arguments")
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise ConfigError("environment 'mcp' needs the package mcp: install rlpipe[agents]") from None
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise ConfigError(f"environment 'mcp': command {command[0]!r} is no program that can be run here")
        super().__init__()
        self._command = list(command)
        self._environment = dict(environment)
        self._question = question
        self._system = system
        self._only = tuple(only)
        self._server: McpServer | None = None

    async def reset(self, task: Task) -> Observation:
        self._server = McpServer(self._command, self._environment)
        tools = await self._server.start()
        missing = [name for name in self._only if name not in {tool.name for tool in tools}]
        if missing:
            raise ConfigError(f"environment 'mcp': the server has no tool {missing[0]!r}; correct option only")
        self.tools = tuple(tool for tool in tools if not self._only or tool.name in self._only)
        if self._question is None:
            return Observation()
        system = (Message("system", self._system),) if self._system else ()
        return Observation((*system, Message("user", str(task.columns[self._question]))))

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop()


class McpServer:
    """One server process. The library's scopes must be left by the task that entered them, so a task of its own holds
    the connection for as long as it is used."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._stop = asyncio.Event()
        self._started: asyncio.Future[tuple[Tool, ...]] = asyncio.get_running_loop().create_future()
        self._session: Any = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> tuple[Tool, ...]:
        """The server's tools. Raises what starting it raises."""
        self._task = asyncio.create_task(self._hold())
        return await asyncio.shield(self._started)

    async def stop(self) -> None:
        """Ends the server and what it started."""
        self._stop.set()
        if self._task is not None:
            if not self._started.done():
                self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _hold(self) -> None:
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import get_default_environment, stdio_client

        variables = {**get_default_environment(), **self._environment}
        parameters = StdioServerParameters(command=self._command[0], args=self._command[1:], env=variables)
        try:
            async with AsyncExitStack() as stack:
                streams = await stack.enter_async_context(stdio_client(parameters))
                self._session = await stack.enter_async_context(ClientSession(*streams))
                await self._session.initialize()
                self._started.set_result(tuple(map(self._tool, (await self._session.list_tools()).tools)))
                await self._stop.wait()
        except Exception as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    def _tool(self, told: Any) -> Tool:
        async def call(**arguments: Any) -> str:
            answer = await self._session.call_tool(told.name, arguments)
            text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in answer.content)
            if answer.isError:
                raise RuntimeError(text)
            return text

        return Tool(told.name, told.description or "", told.inputSchema, call)
