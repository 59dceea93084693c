"""A policy without a model: it writes given texts, then calls of the tools, right and wrong ones, and nonsense."""

import json
import random
import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlpipe.environments.tools import Tool
from rlpipe.shared.sample import Status, VersionSpan
from rollout.requests import GenerateRequest, Generation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LETTERS = string.ascii_lowercase + string.digits + " "
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "string": ("", "a", "hello world", "42", "\u00e4\U0001f600", "<|im_end|>"),
    "integer": (0, 1, -1, 7, 10**9),
    "number": (0, 0.5, -3.25, 1e9),
    "boolean": (True, False),
    "array": ([], [1], ["a", "b"]),
    "object": ({}, {"a": 1}),
    "null": (None,),
}


class StandInPolicy:
    """Answers like an engine: `texts`, then what it draws from `seed`; with `tools`, half of its turns are calls."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        texts: Sequence[str],
        tools: Sequence[Tool],
        tool_format: str,
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = list(texts)
        self._tools = tools
        self._tool_format = tool_format
        self._random = random.Random(seed)

    async def generate(self, request: GenerateRequest) -> Generation:
        text = self._texts.pop(0) if self._texts else self._nonsense()
        stopped = [text.index(stop) + len(stop) for stop in request.sampling.stop if stop in text]
        ids = list(self._tokenizer(text[: min(stopped, default=None)], add_special_tokens=False)["input_ids"])
        if self._tokenizer.eos_token_id is not None and not stopped:
            ids.append(self._tokenizer.eos_token_id)
        limit = request.sampling.max_new_tokens
        status = Status.COMPLETED if len(ids) <= limit else Status.TRUNCATED
        kept = tuple(ids[:limit])
        spans = (VersionSpan(0, len(kept)),)
        return Generation(request.request_id, kept, (-1.0,) * len(kept), status, spans, 0, 0.0, 0)

    def _nonsense(self) -> str:
        if self._tools and self._random.random() < 0.5:
            return self._call(self._random.choice(self._tools))
        if self._random.random() < 0.1:
            return '<tool_call>{"name": </tool_call>'
        return "".join(self._random.choices(_LETTERS, k=self._random.randint(1, 12)))

    def _call(self, tool: Tool) -> str:
        properties = tool.parameters.get("properties", {})
        arguments = {name: self._value(schema) for name, schema in properties.items()}
        if arguments and self._random.random() < 0.1:
            arguments.popitem()
        if self._tool_format == "brackets":
            return f"<<{tool.name}:{next(iter(arguments.values()), '')}>>"
        return f"<tool_call>{json.dumps({'name': tool.name, 'arguments': arguments})}</tool_call>"

    def _value(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return "a"
        if schema.get("enum"):
            return self._random.choice(list(schema["enum"]))
        kind = schema.get("type", "string")
        return self._random.choice(_VALUES.get(kind if isinstance(kind, str) else "string", ("a",)))
