"""Tool calls in what the policy wrote. What cannot be read is a call too, with its problem: the policy is told."""

import re
from collections.abc import Sequence

from rlpipe.environments.tools import Tool
from rlpipe.generation.written_calls import ToolCall, hermes_calls

_BRACKETS = re.compile(r"<<([^<>]*)>>")
_MOST_CALLS = 32


def tool_calls(text: str, tool_format: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
    """The calls in `text`, in order; none where there are no tools. Those beyond the first 32 are one problem."""
    if not tools:
        return ()
    if tool_format == "brackets":
        calls = [_bracket_call(found[1], tools) for found in _BRACKETS.finditer(text)]
    else:
        calls = hermes_calls(text)
    if len(calls) > _MOST_CALLS:
        problem = f"{len(calls)} calls in one turn; at most {_MOST_CALLS} are run"
        return (*calls[:_MOST_CALLS], ToolCall(problem=problem))
    return tuple(calls)


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
