"""Tool calls in what the policy wrote. What cannot be read is a call too, with its problem: the policy is told."""

import json
import re
from collections.abc import Sequence

from rlpipe.environments.tools import Tool, ToolCall

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_BRACKETS = re.compile(r"<<([^<>]*)>>")
_MOST_CALLS = 32


def tool_calls(text: str, tool_format: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
    """The calls in `text`, in order; none where there are no tools. Those beyond the first 32 are one problem."""
    if not tools:
        return ()
    if tool_format == "brackets":
        calls = [_bracket_call(found[1], tools) for found in _BRACKETS.finditer(text)]
    else:
        calls = [_hermes_call(found) for found in _HERMES.finditer(text)]
    if len(calls) > _MOST_CALLS:
        problem = f"{len(calls)} calls in one turn; at most {_MOST_CALLS} are run"
        return (*calls[:_MOST_CALLS], ToolCall(problem=problem))
    return tuple(calls)


def _hermes_call(found: re.Match[str]) -> ToolCall:
    """Nous Hermes' format, which Qwen's chat templates ask for."""
    if not found[0].endswith("</tool_call>"):
        return ToolCall(problem="the call is not closed with </tool_call>")
    try:
        value = json.loads(found[1])
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"the call is no JSON: {str(error)[:200]}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall(problem='the call is no object with "name" and "arguments"')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # some models write them as JSON within JSON
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return ToolCall(value["name"], problem="its arguments are no JSON")
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], problem="its arguments are no JSON object")
    return ToolCall(value["name"], arguments)


def _bracket_call(inner: str, tools: Sequence[Tool]) -> ToolCall:
    """`name: argument`, or the argument alone where there is one tool; it is the tool's first parameter, a text."""
    name, colon, argument = inner.partition(":")
    if not colon and len(tools) == 1:
        name, argument = tools[0].name, inner
    tool = next((one for one in tools if one.name == name.strip()), None)
    if tool is None:
        return ToolCall(name.strip())
    first = next(iter(tool.parameters.get("properties", {})), None)
    return ToolCall(tool.name, {} if first is None else {first: argument.strip()})
