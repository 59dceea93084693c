"""Chat messages in the form that chat templates expect, whatever form rows and agents give them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpipe.shared.strict_json import StrictJsonError, parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Where the reasoning of an assistant's message may stand, beside its content."""
_SHARE_GPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
_SHOWN_CHARACTERS = 80


class MessageProblem(ValueError):
    """Why a message cannot be shown to a policy: words that follow the name of the message."""


@dataclass(frozen=True)
class CalledTool:
    """A tool call of an assistant's message. `arguments` is JSON text, or whatever text stood in its place."""

    name: str
    arguments: str
    call_id: str = ""

    @property
    def parsed_arguments(self) -> Any:
        """What the JSON text says, whole numbers of any size included; the text itself where it is none."""
        if not self.arguments.strip():
            return {}
        try:
            return parse_json(self.arguments.encode(errors="surrogatepass"))
        except StrictJsonError:
            return self.arguments

    def template_form(self) -> dict[str, Any]:
        """Templates want arguments as objects."""
        function = {"name": self.name, "arguments": self.parsed_arguments}
        return {"type": "function", "id": self.call_id, "function": function}


def content_text(content: Any) -> str:
    """The text of a message's content; parts of text are joined by line breaks. Raises MessageProblem for others."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MessageProblem("content is neither text nor a list of parts")
    return "\n".join(_part_text(part, number) for number, part in enumerate(content))


def called_tools(calls: Any) -> tuple[CalledTool, ...]:
    """The tool calls of a message, of which there may be none. Raises MessageProblem for what is no call."""
    if not calls:
        return ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise MessageProblem("tool_calls is no list")
    return tuple(_call_of(call, number) for number, call in enumerate(calls))


def template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A row's message as chat templates expect it; keys that they alone know stay.

    Keys whose value is null are left out, since files of columns give every message the keys of all; JSON text of
    arguments is taken as it is. Raises MessageProblem for a message without role and content, and for one that no text
    can stand for.
    """
    form: dict[str, Any] = _without_nulls(message)
    if "from" in form and "role" not in form:
        form["role"] = _SHARE_GPT_ROLES.get(form["from"], form["from"]) if isinstance(form["from"], str) else None
        form["content"] = form.pop("value", None)
        del form["from"]
    if form.get("role") not in ROLES:
        raise MessageProblem(f"role is {short(form.get('role'))}: use one of {', '.join(ROLES)}")
    calls = called_tools(form.pop("tool_calls", None))
    reasoning = any(form.get(key) for key in REASONING_KEYS)
    if form.get("content") is None and not (form["role"] == "assistant" and (calls or reasoning)):
        raise MessageProblem("content is null: give it text")
    form["content"] = content_text(form.get("content"))
    if form["role"] == "user" and not form["content"].strip():
        raise MessageProblem("content is blank, though it is the user's")
    if calls:
        form["tool_calls"] = [call.template_form() for call in calls]
    return form


def template_tools(tools: Any) -> list[dict[str, Any]]:
    """Schemas of tools from a row: a list, or JSON text of one. Raises MessageProblem for anything else."""
    if isinstance(tools, str):
        try:
            tools = parse_json(tools.encode(errors="surrogatepass"))
        except StrictJsonError as error:
            raise MessageProblem(f"is no JSON text: {error}") from None
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise MessageProblem("is no list of tools, nor JSON text of one")
    for number, tool in enumerate(tools):
        if not tool_name(tool):
            raise MessageProblem(f"has tool {number} without a name")
    return [_without_nulls(tool) for tool in tools]


def tool_name(tool: Any) -> str:
    """The name in a tool's schema, with or without `function` around it; empty where there is none."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def short(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


def _part_text(part: Any, number: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
        raise MessageProblem(
            f"content[{number}] is of type {short(kind)}: this policy reads text alone, no images, sound or video"
        )
    return str(part["text"])


def _call_of(value: Any, number: int) -> CalledTool:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageProblem(f"tool_calls[{number}] is no call of a function with a name")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = ""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return CalledTool(function["name"], arguments, str(value.get("id") or ""))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
