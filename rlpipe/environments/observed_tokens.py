"""Observations as tokens: what the environment says becomes text and never special tokens; what the chat template adds
around it is special."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rlpipe.data.chat_template import ChatShown, render_chat
from rlpipe.data.special_text import SpecialText
from rlpipe.environments.protocol import Message, Observation
from rlpipe.environments.tools import Tool, clean_text
from rlpipe.shared.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACE = "environment"
_TURN = "\u241fthe policy's turn\u241f"


class ObservedTokens:
    """Writes observations in one format for one tokenizer. Observations are at most `most_characters` long.
    template_arguments: what the chat template is given beside messages and tools."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        observation_format: Literal["chat", "text"],
        most_characters: int,
        template_arguments: Mapping[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = observation_format == "chat"
        self._most_characters = most_characters
        self._template_arguments = template_arguments
        self._special = SpecialText(tokenizer)
        self._eos = tokenizer.eos_token_id

    def has_special_text(self, text: str) -> bool:
        return self._special.found_in(text)

    def opening(self, observation: Observation, tools: Sequence[Tool]) -> tuple[str, list[int]] | None:
        """The prompt that the first messages make: text and token ids. None where the row's prompt stands."""
        if not self._chat or not observation.messages:
            return None
        schemas = [tool.schema for tool in tools]
        shown = ChatShown(schemas, self._template_arguments)
        text = render_chat(self._hidden(observation.messages), self._tokenizer, _PLACE, True, shown)
        return self._special.shown(text), self._special.token_ids(text)

    def following(self, observation: Observation, last_token: int | None) -> list[int]:
        """The tokens that come after the policy's turn, which ended in `last_token`, up to where it goes on; None where
        it has written nothing yet."""
        if observation.token_ids:
            return list(observation.token_ids)
        if not observation.messages:
            return []
        hidden = self._hidden(observation.messages)
        if not self._chat:
            return self._special.token_ids("".join(message["content"] for message in hidden))
        return self._chat_following(hidden, last_token)

    def _chat_following(self, messages: list[dict[str, Any]], last_token: int | None) -> list[int]:
        """What the template writes after the assistant's turn, less the end of the turn where the policy wrote it."""
        before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _TURN}]
        shown = ChatShown(arguments=self._template_arguments)
        text = render_chat([*before, *messages], self._tokenizer, _PLACE, True, shown)
        _, found, tail = text.rpartition(_TURN)
        if not found:
            raise ModelError(f"the chat template of {self._tokenizer.name_or_path} leaves out turns of the assistant")
        tokens = self._special.token_ids(tail)
        if last_token == self._eos and tokens[:1] == [self._eos]:
            return tokens[1:]
        return tokens

    def _hidden(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return [
            {
                "role": message.role,
                "content": self._special.prepared(clean_text(message.content, self._most_characters), _PLACE),
                **self._hidden_fields(message.fields),
            }
            for message in messages
        ]

    def _hidden_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        hidden: dict[str, Any] = self._special.prepared(dict(fields), _PLACE)
        return hidden
