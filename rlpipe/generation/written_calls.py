"""Calls of tools as policies write them in JSON: alone, or between `<tool_call>` and `</tool_call>` (Hermes, Qwen)."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_SHOWN_CHARACTERS = 100
MOST_NESTED = 200
"""Levels of JSON that calls may have: orjson writes 254."""


@dataclass(frozen=True)
class ToolCall:
    """A call as the policy wrote it. `problem` says why it cannot be read; the rest is then as far as known."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


def call_blocks(text: str) -> list[tuple[str, bool]]:
    """What stands in each block of a call, and whether the block is closed."""
    return [(inner, bool(end)) for inner, end in _BLOCK.findall(text)]


def hermes_calls(text: str) -> list[ToolCall]:
    """The calls in `text`, in order, also those that cannot be read."""
    unclosed = ToolCall(problem="the call is not closed with </tool_call>")
    return [json_call(inner) if closed else unclosed for inner, closed in call_blocks(text)]


def json_call(text: str) -> ToolCall:
    """An object with `name` and `arguments`, which Llama calls `parameters`, and some models write as JSON in JSON."""
    value, problem = _json(text)
    if problem:
        return ToolCall(problem=f"the call is no JSON: {problem}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall(problem='the call is no object with "name" and "arguments"')
    name = value["name"]
    arguments = value.get("arguments") or value.get("parameters") or {}
    if isinstance(arguments, str):
        arguments, problem = _json(arguments)
        if problem:
            return ToolCall(name, problem=f"the arguments of {name[:_SHOWN_CHARACTERS]!r} are no JSON: {problem}")
    if not isinstance(arguments, dict):
        return ToolCall(name, problem=f"the arguments of {name[:_SHOWN_CHARACTERS]!r} are no JSON object")
    return ToolCall(name, arguments)


def json_text(value: Any) -> str:
    """`value` as JSON. Raises ValueError for what cannot be handed on: NaN and the like, halves of characters, which
    UTF-8 lacks, and nesting that other readers do not follow."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    text.encode()
    if text.count("[") + text.count("{") > MOST_NESTED and _nesting(value) > MOST_NESTED:
        raise ValueError(f"it is nested more than {MOST_NESTED} deep")
    return text


def _nesting(value: Any) -> int:
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, list | dict)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def _json(text: str) -> tuple[Any, str]:
    """The value, or what is wrong with it."""
    try:
        value = json.loads(text)
        json_text(value)
    except (ValueError, RecursionError) as error:
        return None, str(error)[:_SHOWN_CHARACTERS]
    return value, ""
