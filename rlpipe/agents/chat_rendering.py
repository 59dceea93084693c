"""Messages as tokens, by the model's own chat template: a whole prompt, or what comes after tokens that are kept."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlpipe.agents.messages import Message, digest_of
from rlpipe.agents.refusal import Refusal
from rlpipe.agents.tool_call_formats import ToolCallFormat, Tools, format_of
from rlpipe.data.chat_template import left_out, template_text
from rlpipe.data.special_text import SpecialText
from rlpipe.shared.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACE = "the request"
_MOST_REMEMBERED = 4096  # agents may change their tools in every episode
_SHORT_QUESTION: dict[str, Any] = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class ChatOptions:
    """What a chat template is given beside messages."""

    tools: Tools = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def digest(self) -> bytes:
        """Equal for equal options."""
        return digest_of([self.tools, self.template_arguments])


class ChatRenderer:
    """Renders for one tokenizer. Text of special tokens in messages, tools and arguments stays text.

    template_arguments: those of requests that say nothing else.

    What follows kept tokens is the difference of two renderings: of a short dialogue that ends in the kept reply, and
    of the same dialogue with the new messages. The reply holds a mark in both, so that templates that write earlier
    replies otherwise than the last one, without their reasoning for instance, give the same difference. It is compared
    with that of the whole dialogue once for each sequence of roles; where they differ, that one is taken from then on.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", template_arguments: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        if tokenizer.chat_template is None:
            raise ModelError(
                f"the tokenizer {tokenizer.name_or_path} has no chat template, which agents' messages need: add "
                "chat_template.jinja to the model folder"
            )
        self._tokenizer = tokenizer
        self._template_arguments = template_arguments
        self._special = SpecialText(tokenizer)
        self._mark = f"mark{secrets.token_hex(8)}"
        self._short_enough: dict[tuple[Any, ...], bool] = {}
        self._ends: dict[bytes, str] = {}
        self._opens_reasoning: dict[bytes, bool] = {}
        self._prepared: dict[bytes, Mapping[str, Any]] = {}
        self._before: dict[bytes, str | None] = {}
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self.tool_calls: ToolCallFormat | None = format_of(template_text(tokenizer))

    def prompt(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """The whole dialogue, up to where the policy writes. Raises Refusal for what the template cannot show."""
        hidden = self._hidden(messages)
        text = self._render(hidden, options, reply=True)
        _check_shown(hidden, text)
        return text

    def continuation(self, kept: Sequence[Message], new: Sequence[Message], options: ChatOptions) -> str | None:
        """What stands between the end of the last of the `kept` messages, a reply of the policy, and where it writes
        again: the end of the turn, then `new`. None where the template has no one way to write it."""
        hidden = self._hidden(new)
        short = self._short_difference(kept[-1], hidden, options)
        shape = (_shape(kept[-1:]), _shape(new), options.digest)
        if shape not in self._short_enough:
            self._short_enough[shape] = short == self._difference(self._hidden(kept), hidden, options)
        if not self._short_enough[shape]:
            short = self._difference(self._hidden(kept), hidden, options)
        if short is None:
            return None
        _check_shown(hidden, short)
        return self._end_of_turn(options) + short

    def opens_reasoning(self, options: ChatOptions) -> bool:
        """Whether prompts end within `<think>`."""
        key = options.digest
        if key not in self._opens_reasoning:
            text = self._render([_SHORT_QUESTION], options, reply=True)
            self._opens_reasoning[key] = text.rstrip().endswith("<think>")
        return self._opens_reasoning[key]

    def token_ids(self, text: str) -> list[int]:
        """Of a rendered text."""
        return self._special.token_ids(text)

    def plain_token_ids(self, text: str) -> list[int]:
        """Of a text in which special tokens are special."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def text_of(self, token_ids: Sequence[int], special: bool = False) -> str:
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return str(text)

    def holds_special_text(self, messages: Sequence[Message]) -> bool:
        return any(self._special.found_in(message.content) for message in messages)

    def surely_exceeds(self, characters: int, tokens: int) -> bool:
        """Whether no text of so many characters can have so few tokens, so that it need not be tokenized."""
        return characters > tokens * self._longest_token

    def _short_difference(self, reply: Message, new: list[dict[str, Any]], options: ChatOptions) -> str | None:
        base = [_SHORT_QUESTION, self._marked(self._hidden([reply])[0])]
        key = options.digest + digest_of(base)
        if key not in self._before:
            self._before[key] = self._after_mark_of(base, options, reply=False)
        return _rest(self._before[key], self._after_mark_of([*base, *new], options, reply=True))

    def _difference(self, kept: list[dict[str, Any]], new: list[dict[str, Any]], options: ChatOptions) -> str | None:
        base = [*kept[:-1], self._marked(kept[-1])]
        before = self._after_mark_of(base, options, reply=False)
        return _rest(before, self._after_mark_of([*base, *new], options, reply=True))

    def _end_of_turn(self, options: ChatOptions) -> str:
        """What the template writes after the content of a reply."""
        key = options.digest
        if key not in self._ends:
            dialogue = [_SHORT_QUESTION, {"role": "assistant", "content": self._mark}]
            self._ends[key] = self._after_mark_of(dialogue, options, reply=False) or ""
        return self._ends[key]

    def _marked(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        """The reply with the mark as its last part: its content, or the arguments of its last call."""
        marked = {key: value for key, value in reply.items() if key != "reasoning_content"}
        if not reply.get("tool_calls"):
            return {**marked, "content": self._mark}
        *others, last = reply["tool_calls"]
        arguments = {"mark": self._mark}
        calls = [*others, {**last, "function": {**last["function"], "arguments": arguments}}]
        return {**marked, "content": "", "tool_calls": calls}

    def _after_mark_of(self, messages: list[dict[str, Any]], options: ChatOptions, reply: bool) -> str | None:
        """What the template writes after the mark; None where it refuses, or does not write the mark once."""
        try:
            _, mark, after = self._render(messages, options, reply).partition(self._mark)
        except Refusal:
            return None
        return after if mark and self._mark not in after else None

    def _render(self, messages: list[dict[str, Any]], options: ChatOptions, reply: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=reply, tokenize=False, **self._arguments(options)
            )
        except DataError as error:
            raise Refusal(str(error)) from None
        except Exception as error:  # a template is a program of someone else, and may raise anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            raise Refusal(f"the chat template of this policy refuses these messages: {reason}") from None
        return str(text)

    def _arguments(self, options: ChatOptions) -> Mapping[str, Any]:
        if len(self._before) + len(self._prepared) + len(self._short_enough) > _MOST_REMEMBERED:
            for memory in (self._before, self._prepared, self._short_enough, self._ends, self._opens_reasoning):
                memory.clear()
        if options.digest not in self._prepared:
            given = {**self._template_arguments, **options.template_arguments}
            arguments = {**given, "tools": list(options.tools) or None}
            self._prepared[options.digest] = self._special.prepared(arguments, _PLACE)
        return self._prepared[options.digest]

    def _hidden(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """In the template's form, with stand-ins for text of special tokens."""
        try:
            hidden: list[dict[str, Any]] = self._special.prepared(
                [message.template_form() for message in messages], _PLACE
            )
        except DataError as error:
            raise Refusal(str(error)) from None
        return hidden


def _rest(before: str | None, after: str | None) -> str | None:
    return after[len(before) :] if before is not None and after is not None and after.startswith(before) else None


def _shape(messages: Sequence[Message]) -> tuple[tuple[str, bool], ...]:
    return tuple((message.role, bool(message.tool_calls)) for message in messages)


def _check_shown(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    if lost := left_out(messages, text):
        raise Refusal(f"the chat template of this policy leaves out {lost}, so the policy would not see it")
