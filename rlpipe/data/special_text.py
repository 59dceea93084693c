"""Text of special tokens in rows: `<|im_end|>` in a user's text must not end the user's turn.

Before the chat template sees a row, such text is replaced by a stand-in that no row can hold; when the rendered prompt
is tokenized, the stand-in becomes the tokens of the text, while what the template wrote becomes special tokens. Some
tokenizers look for special tokens in text that they have normalized: what becomes one only then is treated alike.
"""

import copy
import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlpipe.shared.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\U0010fffe"  # a code point that Unicode keeps free of meaning for ever
_FIRST = 0xF0000
_STAND_IN = re.compile(f"({_MARK}.)", re.DOTALL)


class SpecialText:
    """The special tokens of a tokenizer, as text."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = backend.normalizer if backend and any(token.normalized for token in added) else None
        special = {str(token) for token in (*added, *tokenizer.all_special_tokens)}
        special |= set(map(self._normalized, special))
        self._tokens = sorted(filter(None, special), key=lambda token: (-len(token), token))
        self._pattern = re.compile("|".join(map(re.escape, self._tokens)) or r"(?!)")

    def found_in(self, value: Any) -> bool:
        """Whether any text in `value`, a text or lists and mappings of them, holds a special token's."""
        if isinstance(value, str):
            return self._pattern.search(self._normalized(value)) is not None
        if isinstance(value, Mapping):
            return any(self.found_in(item) for pair in value.items() for item in pair)
        return isinstance(value, list) and any(self.found_in(item) for item in value)

    def prepared(self, value: Any, place: str, hide: bool = True) -> Any:
        """`value` with stand-ins if `hide`. Raises DataError, naming `place`, for text that holds their mark itself."""
        if isinstance(value, str):
            if _MARK in value:
                raise DataError(f"{place}: the text holds U+10FFFE, which is not a character; remove it")
            return self._hidden(value) if hide else value
        if isinstance(value, Mapping):
            return {self.prepared(key, place, hide): self.prepared(item, place, hide) for key, item in value.items()}
        return [self.prepared(item, place, hide) for item in value] if isinstance(value, list) else value

    def shown(self, text: str) -> str:
        """The text that stand-ins stand for."""
        return _STAND_IN.sub(lambda found: self._tokens[ord(found[0][1]) - _FIRST], text)

    def token_ids(self, text: str) -> list[int]:
        """Tokens of a text with stand-ins: these become text, special tokens outside of them stay special."""
        ids: list[int] = []
        for piece in filter(None, _STAND_IN.split(text)):
            if piece.startswith(_MARK):
                found = self._splitting(self.shown(piece), add_special_tokens=False, split_special_tokens=True)
            else:
                found = self._tokenizer(piece, add_special_tokens=False)
            ids += found["input_ids"]
        return ids

    def _hidden(self, text: str) -> str:
        seen = self._normalized(text)
        hidden = self._pattern.sub(lambda found: _MARK + chr(_FIRST + self._number[found[0]]), seen)
        return text if hidden == seen else hidden

    def _normalized(self, text: str) -> str:
        """As the tokenizer looks for special tokens in it."""
        return text if self._normalizer is None else str(self._normalizer.normalize_str(text))

    @cached_property
    def _number(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self._tokens)}

    @cached_property
    def _splitting(self) -> "PreTrainedTokenizerBase":
        """A tokenizer of its own: one holds whether it splits special tokens, for all threads that use it."""
        return copy.deepcopy(self._tokenizer)
