"""Messages as text, by the chat template of a tokenizer; nothing that it leaves out is lost in silence."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlpipe.data.chat_messages import REASONING_KEYS, tool_name
from rlpipe.data.row_source import first_line
from rlpipe.shared.errors import ConfigError, DataError, ModelError
from rlpipe.shared.overtime import at_most_processor_seconds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEMPLATE_SECONDS = 30.0
_END_OF_REASONING = "</think>"


@dataclass(frozen=True)
class ChatShown:
    """What a chat template is shown beside messages: schemas of tools, and arguments of its own."""

    tools: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    place: str,
    add_generation_prompt: bool,
    shown: ChatShown = ChatShown(),
) -> str:
    """The messages, in the form of `template_message`, as the tokenizer's chat template writes them.

    Raises ModelError for a template that is missing, malformed or without end; DataError, naming `place`, for messages
    or tools that it refuses or leaves out.
    """
    from jinja2 import TemplateSyntaxError

    if tokenizer.chat_template is None:
        raise ModelError(
            f"{place}: the tokenizer {tokenizer.name_or_path} has no chat template; set apply_chat_template to false"
        )
    turns = [dict(message) for message in messages]
    try:
        with at_most_processor_seconds(_TEMPLATE_SECONDS, TimeoutError()):
            text = tokenizer.apply_chat_template(
                turns,
                tools=[dict(tool) for tool in shown.tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **shown.arguments,
            )
    except TemplateSyntaxError as error:
        raise ModelError(f"the chat template of {tokenizer.name_or_path} is malformed: {first_line(error)}") from None
    except TimeoutError:
        raise ModelError(
            f"{place}: the chat template of {tokenizer.name_or_path} computes for more than {_TEMPLATE_SECONDS:g} "
            "seconds on this row; correct the template"
        ) from None
    except Exception as error:  # a template is a program of someone else, and may raise anything
        raise DataError(
            f"{place}: the chat template of {tokenizer.name_or_path} fails on this row: {first_line(error)}"
        ) from None
    if lost := left_out(messages, str(text)) or _tools_left_out(shown.tools, str(text)):
        raise DataError(
            f"{place}: the chat template of {tokenizer.name_or_path} leaves out {lost}; change the row or the template"
        )
    return str(text)


def left_out(messages: Sequence[Mapping[str, Any]], text: str) -> str | None:
    """Which of the messages does not stand in the rendered text, in words; those of the assistant may be cut."""
    for message in messages:
        if message["role"] != "assistant" and not _stands_in(message["content"].strip(), text):
            return f"a message of role {message['role']!r}"
    return None


def turn_left_out(message: Mapping[str, Any], turn: str) -> str | None:
    """What of the assistant's last message does not stand in `turn`, which the template makes of it, in words."""
    answer = message["content"].rpartition(_END_OF_REASONING)[2].strip()
    if answer not in turn:
        return "what the assistant says"
    if any(message.get(key) and str(message[key]).strip() not in turn for key in REASONING_KEYS):
        return "the assistant's reasoning"
    if any(call["function"]["name"] not in turn for call in message.get("tool_calls", ())):
        return "a tool call of the assistant's"
    return None


def check_template_arguments(tokenizer: "PreTrainedTokenizerBase", arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that the tokenizer's chat template does not name, and would not miss."""
    template = template_text(tokenizer)
    for name in arguments:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ConfigError(
                f"data.chat_template_arguments: the chat template of {tokenizer.name_or_path} does not know {name!r}; "
                "correct or remove it"
            )


def template_text(tokenizer: "PreTrainedTokenizerBase") -> str:
    """The chat template; all of them where there are several, and nothing where there is none."""
    template = tokenizer.chat_template or ""
    return template if isinstance(template, str) else "\n".join(template.values())


def _tools_left_out(tools: Sequence[Mapping[str, Any]], text: str) -> str | None:
    return next((f"the tool {tool_name(tool)!r}" for tool in tools if not _stands_in(tool_name(tool), text)), None)


def _stands_in(content: str, text: str) -> bool:
    return any(
        form in text for form in (content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1])
    )
