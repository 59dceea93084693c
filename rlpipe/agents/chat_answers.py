"""Answers of OpenAI's API, whole or as the events of a stream."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from rlpipe.agents.agent_episode import Answer, Reply
from rlpipe.agents.chat_rendering import ChatRenderer
from rlpipe.agents.chat_requests import Wanted
from rlpipe.agents.refusal import Refusal
from rlpipe.data.chat_messages import CalledTool

_DONE = b"data: [DONE]\n\n"


def chat_answer(answer: Answer, wanted: Wanted, model: str, renderer: ChatRenderer) -> dict[str, Any]:
    """Of `/v1/chat/completions`."""
    choices = [
        {
            "index": index,
            "message": _message(reply),
            "finish_reason": reply.finish_reason,
            "logprobs": _logprobs(reply, renderer) if wanted.logprobs else None,
        }
        for index, reply in enumerate(answer.replies)
    ]
    return {**_head("chat.completion", "chatcmpl", answer, model), "choices": choices, "usage": _usage(answer)}


def chat_events(answer: Answer, wanted: Wanted, model: str, renderer: ChatRenderer) -> Iterator[bytes]:
    """The same as server-sent events: each choice's role, reasoning, content and calls, and how it ended."""
    head = _head("chat.completion.chunk", "chatcmpl", answer, model)
    for index, reply in enumerate(answer.replies):
        message = _message(reply)
        logprobs = _logprobs(reply, renderer) if wanted.logprobs else None
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if reply.message.reasoning:
            deltas.append({"reasoning_content": message["reasoning_content"]})
        if message["content"]:
            deltas.append({"content": message["content"]})
        for number, call in enumerate(message.get("tool_calls", ())):
            deltas.append({"tool_calls": [{"index": number, **call}]})
        for delta in deltas:
            yield _event({**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]})
        end = {"index": index, "delta": {}, "finish_reason": reply.finish_reason, "logprobs": logprobs}
        yield _event({**head, "choices": [end]})
    if wanted.stream_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield _DONE


def completion_answer(answer: Answer, wanted: Wanted, model: str, renderer: ChatRenderer) -> dict[str, Any]:
    """Of `/v1/completions`."""
    choices = [_completion_choice(index, reply, wanted, renderer) for index, reply in enumerate(answer.replies)]
    return {**_head("text_completion", "cmpl", answer, model), "choices": choices, "usage": _usage(answer)}


def completion_events(answer: Answer, wanted: Wanted, model: str, renderer: ChatRenderer) -> Iterator[bytes]:
    """The same as server-sent events."""
    head = _head("text_completion", "cmpl", answer, model)
    for index, reply in enumerate(answer.replies):
        yield _event({**head, "choices": [_completion_choice(index, reply, wanted, renderer)]})
    if wanted.stream_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield _DONE


def models_answer(model: str, limit_tokens: int) -> dict[str, Any]:
    """Of `/v1/models`."""
    entry = {"id": model, "object": "model", "created": 0, "owned_by": "rlpipe", "max_model_len": limit_tokens}
    return {"object": "list", "data": [entry]}


def refusal_answer(refusal: Refusal) -> dict[str, Any]:
    """As OpenAI's clients read errors."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": str(refusal), "type": kind, "param": None, "code": refusal.code}}


def _message(reply: Reply) -> dict[str, Any]:
    message = reply.message
    answer: dict[str, Any] = {"role": "assistant", "content": message.content or (None if message.tool_calls else "")}
    if message.reasoning:
        answer["reasoning_content"] = message.reasoning
    if message.tool_calls:
        answer["tool_calls"] = [_call(call) for call in message.tool_calls]
    return answer


def _call(call: CalledTool) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _completion_choice(index: int, reply: Reply, wanted: Wanted, renderer: ChatRenderer) -> dict[str, Any]:
    logprobs = None
    if wanted.logprobs:
        tokens = [renderer.text_of([token], special=True) for token in reply.generation.token_ids]
        logprobs = {"tokens": tokens, "token_logprobs": list(reply.generation.logprobs)}
    text = reply.message.content
    return {"index": index, "text": text, "finish_reason": reply.finish_reason, "logprobs": logprobs}


def _logprobs(reply: Reply, renderer: ChatRenderer) -> dict[str, Any]:
    generation = reply.generation
    texts = [renderer.text_of([token], special=True) for token in generation.token_ids]
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, generation.logprobs, strict=True)
        ]
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.kept_tokens},
    }


def _head(kind: str, prefix: str, answer: Answer, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{answer.answer_id}", "object": kind, "created": int(time.time()), "model": model}


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
