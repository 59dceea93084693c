"""What the policy wrote, as an assistant's message: reasoning, content and tool calls, in the formats of our families.

The formats are read as SGLang's detectors of the same names read them (`qwen25`, `qwen3_coder`, `llama3`), with one
difference: a text of which any call cannot be read is returned to the agent as it is, so that nothing is lost.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpipe.data.chat_messages import CalledTool
from rlpipe.generation.written_calls import ToolCall, call_blocks, hermes_calls, json_call, json_text

Tools = Sequence[Mapping[str, Any]]
_THINK_END = "</think>"
_THINK_BEGIN = "<think>"


@dataclass(frozen=True)
class Parsed:
    """`problem` says why calls that the policy may have meant are still in `content`; empty where there is none."""

    content: str
    tool_calls: tuple[CalledTool, ...] = ()
    problem: str = ""


class MalformedCall(Exception):
    """A tool call that cannot be read."""


@dataclass(frozen=True)
class ToolCallFormat:
    """How a family writes calls. `read` gives the text before the first call and the calls, or raises MalformedCall;
    `opening` is what the policy has to go on from so that it calls a tool, of a given name or of its choice."""

    marker: str
    read: Callable[[str, Tools], tuple[str, list[CalledTool]]]
    opening: Callable[[str | None], str]

    def parse(self, text: str, tools: Tools) -> Parsed:
        if self.marker not in text:
            return Parsed(text)
        try:
            before, calls = self.read(text, tools)
        except MalformedCall as error:
            return Parsed(text, problem=str(error))
        known = {function_of(tool)["name"] for tool in tools}
        unknown = next((call.name for call in calls if call.name not in known), None)
        if unknown is not None:
            return Parsed(text, problem=f"no tool has the name {unknown[:80]!r}")
        return Parsed(before.strip(), tuple(calls)) if calls else Parsed(text)


def format_of(template: str) -> ToolCallFormat | None:
    """The format that a chat template asks the policy for; None where it shows no tools, or in another format."""
    if not re.search(r"\btools\b", template):
        return None
    if "<function=" in template:
        return _QWEN3_CODER
    if "<tool_call>" in template:
        return _HERMES
    return _LLAMA3 if '"parameters"' in template else None


def split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """(reasoning, rest) of what the policy wrote. opened: the prompt ended within `<think>`."""
    inside = opened or text.lstrip().startswith(_THINK_BEGIN)
    reasoning, end, rest = text.partition(_THINK_END)
    if not end and not inside:
        return "", text
    return reasoning.replace(_THINK_BEGIN, "", 1).strip(), rest.lstrip("\n")


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name, description and parameters of a tool."""
    function: Mapping[str, Any] = tool["function"]
    return function


def _read_hermes(text: str, tools: Tools) -> tuple[str, list[CalledTool]]:
    return text.partition("<tool_call>")[0], [_called(call) for call in hermes_calls(text)]


def _called(call: ToolCall) -> CalledTool:
    if call.problem:
        raise MalformedCall(call.problem)
    return CalledTool(call.name, json_text(call.arguments))


_FUNCTION = re.compile(r"<function=([^>]*)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def _read_qwen3_coder(text: str, tools: Tools) -> tuple[str, list[CalledTool]]:
    calls = []
    for inner, closed in call_blocks(text):
        found = _FUNCTION.findall(inner)
        if not closed or not found:
            raise MalformedCall("a call has no <function=...> that is closed")
        for name, body in found:
            types = _parameter_types(name, tools)
            arguments = {key: _value(value, types.get(key)) for key, value in _PARAMETER.findall(body)}
            calls.append(CalledTool(name, json_text(arguments)))
    return text.partition("<tool_call>")[0], calls


def _parameter_types(name: str, tools: Tools) -> dict[str, str | None]:
    for tool in map(function_of, tools):
        parameters = tool.get("parameters")
        if tool["name"] == name and isinstance(parameters, Mapping):
            properties = parameters.get("properties", {})
            return {key: _type_of(schema) for key, schema in properties.items()}
    return {}


def _type_of(schema: Any) -> str | None:
    """The JSON type of a parameter; for a choice of several, the first that is not null."""
    if not isinstance(schema, Mapping):
        return None
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return next((str(kind) for kind in kinds if kind != "null"), None)
    if kinds is None:
        options = schema.get("anyOf") or schema.get("oneOf") or ()
        return next((kind for option in options if (kind := _type_of(option)) not in (None, "null")), None)
    return str(kinds)


def _value(text: str, kind: str | None) -> Any:
    """A parameter's text as its schema has it; the text itself where it is none such."""
    text = text.removeprefix("\n").removesuffix("\n")
    if text.lower() == "null":
        return None
    if kind in (None, "string"):
        return text
    if kind == "boolean":
        return text.lower() == "true" if text.lower() in ("true", "false") else text
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
            json_text({"": value})
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            continue
        return value
    return text


_PYTHON_TAG = "<|python_tag|>"
_SEPARATOR = ";"


def _read_llama3(text: str, tools: Tools) -> tuple[str, list[CalledTool]]:
    before, tag, after = text.partition(_PYTHON_TAG)
    if not tag:
        before, after = "", text
    if not after.lstrip().startswith("{"):
        return text, []
    return before, [_called(json_call(part)) for part in _separate(after)]


def _separate(text: str) -> Iterator[str]:
    """Calls that `;` tells apart; one within a call, in a command for instance, does not."""
    decoder = json.JSONDecoder()
    while text := text.lstrip(f"{_SEPARATOR} \t\r\n"):
        try:
            _, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            end = len(text)
        rest = text[end:].lstrip()
        if rest and not rest.startswith(_SEPARATOR):
            rest, end = "", len(text)
        yield text[:end]
        text = rest


_HERMES = ToolCallFormat(
    "<tool_call>",
    _read_hermes,
    lambda name: f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ' if name else "<tool_call>\n",
)
_QWEN3_CODER = ToolCallFormat(
    "<tool_call>",
    _read_qwen3_coder,
    lambda name: f"<tool_call>\n<function={name}>\n" if name else "<tool_call>\n<function=",
)
_LLAMA3 = ToolCallFormat(
    "{",
    _read_llama3,
    lambda name: f'{{"name": {json.dumps(name)}, "parameters": ' if name else '{"name": "',
)
FORMATS: Mapping[str, ToolCallFormat] = {"qwen25": _HERMES, "qwen3_coder": _QWEN3_CODER, "llama3": _LLAMA3}
"""By the names of SGLang's detectors."""
