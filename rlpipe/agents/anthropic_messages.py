"""Anthropic's Messages API: its requests as those of OpenAI's, and answers in its form."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from rlpipe.agents.agent_episode import Answer
from rlpipe.agents.refusal import Refusal
from rlpipe.data.chat_messages import CalledTool

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of `/v1/messages` as one of `/v1/chat/completions`. Raises Refusal for what is malformed."""
    messages = body.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise Refusal("messages is no list")
    system = body.get("system")
    converted = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
            raise Refusal(f"messages[{index}].role is neither user nor assistant")
        converted += _messages(message, f"messages[{index}]")
    if messages and messages[-1]["role"] == "assistant":
        raise Refusal("the last message is the assistant's: an answer is not begun for this policy; leave it out")
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise Refusal("tools is no list")
    rest = {name: body[name] for name in ("max_tokens", "stream", "temperature", "top_p", "top_k") if name in body}
    return {
        **rest,
        "messages": converted,
        "tools": [_tool(tool) for tool in tools],
        "tool_choice": _tool_choice(body.get("tool_choice")),
        "stop": body.get("stop_sequences") or None,
    }


def answer(answer: Answer, model: str) -> dict[str, Any]:
    """Of `/v1/messages`."""
    return {**_head(answer, model), "content": _blocks(answer), **_ending(answer)}


def events(answer: Answer, model: str) -> Iterator[bytes]:
    """The same as server-sent events."""
    begun = {**_head(answer, model), "content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message=begun)
    for index, block in enumerate(_blocks(answer)):
        if block["type"] == "text":
            start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            arguments = orjson.dumps(block["input"]).decode()
            start, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": arguments}
        yield _event("content_block_start", index=index, content_block=start)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_ending(answer), usage={"output_tokens": answer.completion_tokens})
    yield _event("message_stop")


def refusal(refusal: Refusal) -> dict[str, Any]:
    """As Anthropic's clients read errors."""
    return {"type": "error", "error": {"type": refusal.code, "message": str(refusal)}}


def _head(answer: Answer, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.answer_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def _ending(answer: Answer) -> dict[str, Any]:
    (reply,) = answer.replies
    if reply.finish_reason == "stop" and reply.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_string}
    return {"stop_reason": _STOP_REASONS[reply.finish_reason], "stop_sequence": None}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    (reply,) = answer.replies
    text = [{"type": "text", "text": reply.message.content}] if reply.message.content else []
    calls = [
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _input(call)}
        for call in reply.message.tool_calls
    ]
    return text + calls


def _input(call: CalledTool) -> Any:
    """The JSON that the policy wrote, with whole numbers of any size; its text where it is none."""
    try:
        orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        return call.parsed_arguments
    return orjson.Fragment(call.arguments)


def _messages(message: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """One message of theirs: results of tools are messages of their own with OpenAI, and come before the text."""
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, Sequence):
        raise Refusal(f"{place}.content is neither text nor a list of blocks")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(str(block.get("text") or ""))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "function": function})
        elif kind == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        elif kind not in ("thinking", "redacted_thinking"):
            raise Refusal(f"{place} has a block of type {str(kind)[:80]!r}: this policy reads text alone")
    own: dict[str, Any] = {"role": message["role"], "content": [{"type": "text", "text": text} for text in texts]}
    if calls:
        own["tool_calls"] = calls
    return [*results, own] if texts or calls or not results else results


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or "input_schema" not in tool:
        raise Refusal("a tool has no input_schema")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return None
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return _CHOICES.get(str(choice.get("type")), str(choice.get("type")))


def _event(kind: str, **content: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **content}) + b"\n\n"
