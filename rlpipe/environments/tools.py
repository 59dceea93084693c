"""Tools: what the policy may call, and the one place where calls are run within limits and what comes back is tamed.

A tool may hang, crash, answer ten megabytes or write special tokens: each call ends in one answer, a text of bounded
length, and its failures are counted by kind. What runs in this process can still stop it as a whole (a crash of the
interpreter, an `async` function that never awaits), so programs of a policy belong into `rewards.sandbox` or an MCP
server.
"""

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from pydantic import TypeAdapter
from referencing import Registry

from rlpipe.config.environment import EnvironmentConfig, ToolLimits
from rlpipe.environments.bounded import in_thread, within
from rlpipe.generation.written_calls import ToolCall
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.turn import ToolUse

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 2.0
_LONGEST_ERROR_CHARACTERS = 300
_HIDING_MARK = "\U0010fffe"  # marks stand-ins of special tokens (rlpipe.data.special_text); no text may hold it


@dataclass(frozen=True)
class Tool:
    """A function the policy may call. `parameters` is the JSON schema of its arguments, an object.

    `call` gets the arguments by name. A plain function runs in a thread of its own, an `async` one in the event loop.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[..., Any]

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and the OpenAI interface want it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolAnswer:
    """What the policy is told, and how the call went."""

    text: str
    use: ToolUse


def tool_of(function: Callable[..., Any]) -> Tool:
    """A tool made from a function: its name, its docstring, and a JSON schema of its annotations."""
    adapter: TypeAdapter[Any] = TypeAdapter(function)  # type: ignore[arg-type]
    schema = adapter.json_schema()
    properties, required = {}, schema.get("required", [])
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.annotation is inspect.Parameter.empty:
            raise ConfigError(f"tool {function.__name__!r}: its parameter {name!r} has no type; annotate it")
        properties[name] = schema["properties"][name]
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if "$defs" in schema:
        parameters["$defs"] = schema["$defs"]
    return Tool(function.__name__, inspect.getdoc(function) or "", parameters, function)


class ToolPlaces:
    """Places of every tool, shared by all episodes of a run. Lives in one event loop."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._places: dict[str, asyncio.Semaphore] = {}

    def limits(self, name: str) -> ToolLimits:
        return self._config.tool_limits.get(name, self._config.tools)

    def of(self, name: str) -> asyncio.Semaphore:
        if name not in self._places:
            self._places[name] = asyncio.Semaphore(self.limits(name).concurrency)
        return self._places[name]


class ToolBox:
    """Runs the tools of one environment. `has_special_text` tells whether a text holds a special token's."""

    def __init__(self, places: ToolPlaces, has_special_text: Callable[[str], bool] = lambda text: False) -> None:
        self._places = places
        self._has_special_text = has_special_text
        self._uses: list[ToolUse] = []

    async def call(self, call: ToolCall, tools: Sequence[Tool]) -> ToolAnswer:
        """The answer to one call. Never raises for what tool or policy do."""
        (answer,) = await self.call_all([call], tools)
        return answer

    async def call_all(self, calls: Sequence[ToolCall], tools: Sequence[Tool]) -> list[ToolAnswer]:
        """The answers, in the order of the calls, which run side by side."""
        answers = await asyncio.gather(*(self._answer(call, tools) for call in calls))
        self._uses += [answer.use for answer in answers]
        return answers

    def take_uses(self) -> tuple[ToolUse, ...]:
        """The calls since the last time."""
        uses, self._uses = self._uses, []
        return tuple(uses)

    async def _answer(self, call: ToolCall, tools: Sequence[Tool]) -> ToolAnswer:
        start = time.monotonic()
        tool = next((one for one in tools if one.name == call.name), None)
        failure, retries = "", 0
        if call.problem:
            failure, text = "malformed", f"error: {call.problem}"
        elif tool is None:
            names = ", ".join(one.name for one in tools)
            failure, text = "unknown", f"error: there is no tool {call.name[:100]!r}; there are: {names}"
        elif problem := _argument_problem(tool, call.arguments):
            failure, text = "arguments", f"error: {problem}"
        else:
            failure, text, retries = await self._tried(tool, call.arguments)
        limit = (self._places.limits(call.name) if tool else ToolLimits()).max_answer_characters
        text, cut = _cut(clean_text(text, limit + 1), limit)
        use = ToolUse(
            name=call.name[:100] or "?",
            seconds=time.monotonic() - start,
            failure=failure,
            retries=retries,
            cut=cut,
            special_text=self._has_special_text(text),
        )
        return ToolAnswer(text, use)

    async def _tried(self, tool: Tool, arguments: Mapping[str, Any]) -> tuple[str, str, int]:
        """Failure, answer, retries."""
        limits = self._places.limits(tool.name)
        failure, text = "", ""
        for attempt in range(limits.retries + 1):
            if attempt:
                await asyncio.sleep(min(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1), _LONGEST_PAUSE_SECONDS))
            failure, text = await self._once(tool, arguments, limits)
            if failure in ("", "exhausted"):
                return failure, text, attempt
        return failure, text, limits.retries

    async def _once(self, tool: Tool, arguments: Mapping[str, Any], limits: ToolLimits) -> tuple[str, str]:
        places = self._places.of(tool.name)
        try:
            await asyncio.wait_for(places.acquire(), limits.timeout_seconds)
        except TimeoutError:
            return "exhausted", f"error: {tool.name} is busy; try again later"
        try:
            # A call that cannot be stopped keeps its place until it ends, so that hanging ones cannot pile up.
            answer = await within(limits.timeout_seconds, _answer_of(tool, arguments), places.release)
        except TimeoutError:
            return "timeout", f"error: {tool.name} took longer than {limits.timeout_seconds:g} seconds"
        except Exception as error:  # a tool is someone else's program, and may raise anything
            return "error", f"error: {type(error).__name__}: {_message(error)}"
        return "", answer


def answer_text(answer: Any) -> str:
    """What a tool returned as text: text as it is, anything else as JSON where it has one."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, bytes):
        return answer.decode("utf-8", errors="replace")
    try:
        return json.dumps(answer, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        return str(answer)


def clean_text(text: str, limit: int) -> str:
    """At most `limit` characters of `text`, without what no tokenizer or template can hold."""
    return text[:limit].encode("utf-8", errors="replace").decode("utf-8").replace(_HIDING_MARK, "\ufffd")


def _cut(text: str, limit: int) -> tuple[str, bool]:
    if len(text) <= limit:
        return text, False
    return f"{text[:limit]}\n[cut after {limit} characters]", True


async def _answer_of(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """As text, which a plain function's answer becomes in its thread: that may take as long, and fail as well."""
    if inspect.iscoroutinefunction(tool.call):
        return answer_text(await tool.call(**arguments))

    def called() -> Any:
        answer = tool.call(**arguments)
        return answer if isinstance(answer, Awaitable) else answer_text(answer)

    answer = await in_thread(called, f"tool-{tool.name}")
    return answer if isinstance(answer, str) else answer_text(await answer)


def _message(error: Exception) -> str:
    try:
        return str(error)[:_LONGEST_ERROR_CHARACTERS]
    except Exception:  # it is someone else's, too
        return "(it has no text)"


def _argument_problem(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """What is wrong with the arguments by the tool's schema; empty where nothing is."""
    try:
        validator = Draft202012Validator(tool.parameters, registry=Registry())  # which fetches nothing
        found = next(iter(validator.iter_errors(dict(arguments))), None)
    except Exception as error:  # a schema is someone else's, and may be none
        return f"the arguments of {tool.name} cannot be checked: {_message(error)}"
    return "" if found is None else f"arguments of {tool.name}: {found.message[:_LONGEST_ERROR_CHARACTERS]}"
