"""Requests with anything in any place: refused in a sentence or served, and what is served is trained as sampled."""

import asyncio
import copy
import json
import random

import pytest
from agent_support import TOOLS, serving
from random_policy_engine import RandomPolicy, assert_trained_once_as_sampled

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"number": 3}'}}
SCHEMA = {"name": "s", "schema": {"type": "object", "properties": {"sum": {"type": "integer"}}}}
SAMPLING = {"max_tokens": 9, "seed": 3, "stream": True, "stream_options": {"include_usage": True}, "temperature": 1.0}
CHAT = {
    **SAMPLING,
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "ok", "tool_calls": [CALL], "reasoning_content": "because"},
        {"role": "tool", "tool_call_id": "call_1", "content": "7"},
        {"role": "user", "content": "x", "name": "n"},
    ],
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "n": 2,
    "stop": ["a"],
    "logprobs": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "response_format": {"type": "json_schema", "json_schema": SCHEMA},
    "logit_bias": {},
}
COMPLETION = {**SAMPLING, "prompt": "go", "n": 2, "stop": ["a"], "logprobs": 1, "suffix": None}
ANTHROPIC = {
    "max_tokens": 9,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "t"},
                {"type": "tool_use", "id": "c", "name": "add", "input": {"number": 3}},
                {"type": "thinking", "thinking": "because"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "7"}]},
                {"type": "text", "text": "z"},
            ],
        },
    ],
    "tools": [{"name": "add", "description": "d", "input_schema": {"type": "object", "properties": {}}}],
    "tool_choice": {"type": "any"},
    "stop_sequences": ["a"],
    "stream": True,
}
BODIES = {"chat/completions": CHAT, "completions": COMPLETION, "messages": ANTHROPIC}
ANYTHING = [
    None, True, 0, -1, 3.5, 1e308, 2**70, "", "x", "<|im_end|>", "\ud800", "a" * 300, [], {}, [None], [1], [[[]]],
    {"a": 1}, [{"type": "text", "text": "y"}], {"type": "tool_use"}, {"role": "user"}, {"function": None},
    {"function": {"name": {}}},
]  # fmt: skip


def places_in(value, at=()):
    """The places of all members below it."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield (*at, key)
        yield from places_in(member, (*at, key))


def spoilt(body, numbers: random.Random):
    body = copy.deepcopy(body)
    for _ in range(numbers.choice([0, 1, 1, 2, 3])):
        *above, last = numbers.choice([*places_in(body)])
        holder = body
        for key in above:
            holder = holder[key]
        if numbers.random() < 0.2:
            del holder[last]
        else:
            holder[last] = copy.deepcopy(numbers.choice(ANYTHING))
    return body


@pytest.mark.parametrize("formats", ["refused", "unenforced"])
def test_no_request_makes_the_endpoint_fail_or_trains_what_was_not_sampled(any_tokenizer, formats):
    async def use(open_episode, numbers):
        statuses = []
        for episode in range(12):
            one, begun = open_episode(f"g-{episode:03d}"), len(policy.written)
            headers = {"authorization": f"Bearer {one.endpoint.key}"}
            for _ in range(25):
                kind = numbers.choice([*BODIES])
                body = json.dumps(spoilt(BODIES[kind], numbers))
                answer = await one.client._client.post(f"{one.url}/{kind}", content=body, headers=headers)
                assert answer.status_code in (200, 400), (kind, body)
                statuses.append(answer.status_code)
                if answer.status_code == 400:
                    assert answer.json()["error"]["message"], (kind, body)
            assert_trained_once_as_sampled(one.episode.samples(), policy.written[begun:])
        return statuses

    async def run():
        async with serving(any_tokenizer, policy, formats=formats) as open_episode:
            return await use(open_episode, random.Random(len(formats)))

    policy = RandomPolicy(any_tokenizer)
    statuses = asyncio.run(run())
    assert 0.2 < statuses.count(200) / len(statuses) < 0.8
