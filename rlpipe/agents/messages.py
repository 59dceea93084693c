"""Chat messages as agents send them: checked, brought into one form, told apart."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from rlpipe.agents.refusal import Refusal
from rlpipe.data.chat_messages import ROLES, CalledTool, MessageProblem, called_tools, content_text, short


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
            form["tool_calls"] = [call.template_form() for call in self.tool_calls]
        if self.name:
            form["name"] = self.name
        if self.tool_call_id:
            form["tool_call_id"] = self.tool_call_id
        return form

    def _meaning(self) -> list[Any]:
        if self.role == "assistant":
            calls = [[call.name, _compared(call.arguments)] for call in self.tool_calls]
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
        raise Refusal(f"{place}.role is {short(role)}: use one of {', '.join(ROLES)}")
    try:
        content, calls = content_text(value.get("content")), called_tools(value.get("tool_calls"))
    except MessageProblem as problem:
        raise Refusal(f"{place}.{problem}") from None
    return Message(
        role=role,
        content=content,
        tool_calls=calls,
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


def _compared(arguments: str) -> Any:
    """Arguments of a call as requests give them, in which whole numbers of more than 64 bits are rounded. None at all
    are an empty object."""
    if not arguments.strip():
        return {}
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments


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
    return f"{message.role} {short(message.content + calls)}"
