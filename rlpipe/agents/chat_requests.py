"""Requests of OpenAI's API as far as they say what is to be sampled, checked field by field."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpipe.agents.chat_rendering import ChatOptions
from rlpipe.agents.messages import Message, MessageReader
from rlpipe.agents.refusal import Refusal
from rlpipe.agents.response_formats import ResponseFormat, response_format
from rlpipe.agents.tool_call_formats import Tools

_MOST_CHOICES = 128
_MOST_STOPS = 16
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0}


@dataclass(frozen=True)
class Wanted:
    """What chat and plain completions have in common. `sampling`: what the request says of the distribution, which a
    run does not follow; `max_tokens` None: as many as there is room for."""

    choices: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False
    sampling: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class ChatRequest:
    """`tool_choice`: `none`, `auto`, `required`, or the name of a tool."""

    messages: tuple[Message, ...]
    options: ChatOptions
    tool_choice: str
    named_tool: str | None
    response_format: ResponseFormat | None
    wanted: Wanted

    @property
    def parses_calls(self) -> bool:
        return bool(self.options.tools) and self.tool_choice != "none"


@dataclass(frozen=True)
class CompletionRequest:
    """`prompt` is text, or token ids."""

    prompt: str | tuple[int, ...]
    wanted: Wanted


def chat_request(body: Mapping[str, Any], reader: MessageReader) -> ChatRequest:
    """Of `/v1/chat/completions`; `reader` is that of the episode.

    Raises Refusal for what is malformed, and for what this policy cannot do.
    """
    messages = body.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise Refusal("messages is empty or no list")
    tools = _tools(body.get("tools"))
    choice, named = _tool_choice(body.get("tool_choice"), tools)
    arguments = body.get("chat_template_kwargs") or {}
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise Refusal("chat_template_kwargs is no object")
    if body.get("top_logprobs"):
        raise Refusal("top_logprobs: the engines tell log-probabilities of the sampled tokens alone; leave it out")
    tokens = body.get("max_completion_tokens")
    if tokens is None:  # clients that know both names send null for the other
        tokens = body.get("max_tokens")
    return ChatRequest(
        messages=reader.read(messages),
        options=ChatOptions(tools, dict(arguments)),
        tool_choice=choice,
        named_tool=named,
        response_format=response_format(body.get("response_format")),
        wanted=_wanted(body, tokens, logprobs=body.get("logprobs") is True),
    )


def completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    """Of `/v1/completions`. Raises Refusal likewise."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        prompt = tuple(prompt)
    elif not isinstance(prompt, str) or not prompt:
        raise Refusal("prompt is neither a text nor a list of token ids; several prompts are several requests")
    for name in ("echo", "suffix", "logit_bias"):
        if body.get(name):
            raise Refusal(f"{name} is not supported; leave it out")
    logprobs = body.get("logprobs")
    if isinstance(logprobs, int) and logprobs > 1:
        raise Refusal("logprobs: the engines tell log-probabilities of the sampled tokens alone; set it to 1")
    if body.get("best_of") not in (None, 1, body.get("n")):
        raise Refusal("best_of is not supported; leave it out")
    return CompletionRequest(prompt, _wanted(body, body.get("max_tokens"), logprobs=bool(logprobs)))


def _wanted(body: Mapping[str, Any], max_tokens: Any, logprobs: bool) -> Wanted:
    if body.get("logit_bias"):
        raise Refusal("logit_bias would change what is sampled, and with it what is learned; leave it out")
    stop = body.get("stop") or []
    stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else (None,)
    if len(stop) > _MOST_STOPS or not all(isinstance(one, str) and one for one in stop):
        raise Refusal(f"stop is neither a text nor a list of at most {_MOST_STOPS} texts")
    options = body.get("stream_options") or {}
    sampling = tuple(
        (name, float(body[name]))
        for name in _SAMPLING
        if isinstance(body.get(name), int | float) and body[name] != _NEUTRAL.get(name)
    )
    return Wanted(
        choices=_whole(body, "n", 1, _MOST_CHOICES) or 1,
        max_tokens=_whole({"max_tokens": max_tokens}, "max_tokens", 1, 2**31),
        stop=stop,
        seed=_whole(body, "seed", -(2**63), 2**63),
        logprobs=logprobs,
        stream=body.get("stream") is True,
        stream_usage=isinstance(options, Mapping) and options.get("include_usage") is True,
        sampling=sampling,
    )


def _whole(body: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = body.get(name)
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise Refusal(f"{name} is {value!r}: give a whole number from {least} to {most}")
    return value


def _tools(value: Any) -> Tools:
    if not value:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise Refusal("tools is no list")
    for number, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Refusal(f"tools[{number}] is no function with a name")
    return tuple(value)


def _tool_choice(value: Any, tools: Tools) -> tuple[str, str | None]:
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        name = value["function"].get("name")
        if name not in [tool["function"]["name"] for tool in tools]:
            raise Refusal(f"tool_choice names {str(name)[:80]!r}, which is none of the tools")
        return "required", name
    if value not in (None, "auto", "none", "required"):
        raise Refusal(f"tool_choice is {str(value)[:80]!r}: use auto, none, required, or a function's name")
    if value == "required" and not tools:
        raise Refusal("tool_choice is 'required', but there are no tools")
    return value or "auto", None
