"""Chat messages as agents send them: checked, brought into one form, told apart."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from rlpipe.agents.refusal import Refusal

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class CalledTool:
    """A tool call of an assistant's message. `arguments` is JSON text, or whatever text stood in its place."""

    name: str
    arguments: str
    call_id: str = ""

    @property
    def parsed_arguments(self) -> Any:
        """What the JSON text says; the text itself where it is none."""
        try:
            return orjson.loads(self.arguments)
        except orjson.JSONDecodeError:
            return self.arguments


@dataclass(frozen=True)
class Message:
    """One message. `content` is empty where it has none; parts of text are joined by line breaks."""

    role: str
    content: str
    tool_calls: tuple[CalledTool, ...] = ()
    reasoning: str = ""
    name: str = ""
    tool_call_id: str = ""
    _fingerprint: bytes = field(default=b"", compare=False, repr=False)

    @property
    def fingerprint(self) -> bytes:
        """Equal for messages that mean the same. Of an assistant's, neither its reasoning, which most agents drop, nor
        blanks around its content, ids of calls or the layout of their JSON count."""
        if not self._fingerprint:
            object.__setattr__(self, "_fingerprint", _digest(self._meaning()))
        return self._fingerprint

    def template_form(self) -> dict[str, Any]:
        """As chat templates expect it. They know no `developer`, and want arguments of calls as objects."""
        form: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.reasoning:
            form["reasoning_content"] = self.reasoning
        if self.tool_calls:
            form["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.call_id,
                    "function": {"name": call.name, "arguments": call.parsed_arguments},
                }
                for call in self.tool_calls
            ]
        if self.name:
            form["name"] = self.name
        if self.tool_call_id:
            form["tool_call_id"] = self.tool_call_id
        return form

    def _meaning(self) -> list[Any]:
        if self.role == "assistant":
            calls = [[call.name, call.parsed_arguments] for call in self.tool_calls]
            return [self.role, self.content.strip(), calls]
        return [self.role, self.content, self.name, self.tool_call_id]


class MessageReader:
    """Reads the messages of one request after another; what comes again at the same place is read once."""

    def __init__(self) -> None:
        self._values: Sequence[Any] = ()
        self._messages: tuple[Message, ...] = ()

    def read(self, values: Sequence[Any]) -> tuple[Message, ...]:
        """Raises Refusal for what no chat template can show the policy."""
        same = 0
        for before, now in zip(self._values, values, strict=False):
            if before != now:
                break
            same += 1
        new = (message_of(value, index) for index, value in enumerate(values[same:], same))
        self._messages = (*self._messages[:same], *new)
        self._values = values
        return self._messages


def message_of(value: Any, index: int) -> Message:
    """The message at `index` of a request. Raises Refusal for what no chat template can show the policy."""
    place = f"messages[{index}]"
    if not isinstance(value, dict):
        raise Refusal(f"{place} is no object")
    role = value.get("role")
    if role not in ROLES:
        raise Refusal(f"{place}.role is {_short(role)}: use one of {', '.join(ROLES)}")
    calls = value.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise Refusal(f"{place}.tool_calls is no list")
    return Message(
        role=role,
        content=_text_of(value.get("content"), f"{place}.content"),
        tool_calls=tuple(_call_of(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(calls)),
        reasoning=_optional_text(value, "reasoning_content", place),
        name=_optional_text(value, "name", place),
        tool_call_id=_optional_text(value, "tool_call_id", place),
    )


def chain(start: bytes, messages: Sequence[Message]) -> list[bytes]:
    """After each message, a digest of `start` and all messages up to it."""
    digests, last = [], start
    for message in messages:
        last = hashlib.blake2b(last + message.fingerprint, digest_size=16).digest()
        digests.append(last)
    return digests


def digest_of(value: Any) -> bytes:
    """Equal for equal JSON values, whatever the order of their keys."""
    return _digest(value)


def first_difference(kept: Sequence[Message], given: Sequence[Message]) -> str:
    """Where the messages of a request leave those that were kept, in words."""
    for index, (before, now) in enumerate(zip(kept, given, strict=False)):
        if before.fingerprint != now.fingerprint:
            return f"message {index} was {_shown(before)} and is now {_shown(now)}"
    return f"{len(kept)} messages were kept, and {len(given)} came"


def _call_of(value: Any, place: str) -> CalledTool:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(f"{place} is no call of a function with a name")
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = orjson.dumps(arguments).decode()
    return CalledTool(function["name"], arguments, str(value.get("id") or ""))


def _text_of(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(f"{place} is neither text nor a list of parts")
    return "\n".join(_part_text(part, f"{place}[{number}]") for number, part in enumerate(content))


def _part_text(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
        raise Refusal(f"{place} is of type {_short(kind)}: this policy reads text alone")
    return str(part["text"])


def _optional_text(value: Mapping[str, Any], name: str, place: str) -> str:
    text = value.get(name)
    if text is not None and not isinstance(text, str):
        raise Refusal(f"{place}.{name} is no text")
    return text or ""


def _digest(value: Any) -> bytes:
    try:
        data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError as error:
        raise Refusal(f"the request holds JSON that cannot be written again: {error}") from None
    return hashlib.blake2b(data, digest_size=16).digest()


def _shown(message: Message) -> str:
    calls = "".join(f" {call.name}({call.arguments})" for call in message.tool_calls)
    return f"{message.role} {_short(message.content + calls)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"
