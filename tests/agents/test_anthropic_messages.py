"""Anthropic's own client against the endpoint."""

import asyncio
from collections import Counter

import pytest
from agent_support import serving
from random_policy_engine import assert_trained_once_as_sampled
from test_endpoint import said

TOOLS = [
    {
        "name": "add",
        "description": "adds",
        "input_schema": {"type": "object", "properties": {"number": {"type": "integer"}}},
    }
]
CALL = 'let me see<tool_call>\n{"name": "add", "arguments": {"number": 1180591620717411303424}}\n</tool_call>'
QUESTION = {"role": "user", "content": "x"}


def served(policy, use, counts=None):
    """What `use` of a client, of its episode and of nothing else gives."""
    import anthropic

    async def run():
        async with serving(policy.tokenizer, policy, counts=counts) as open_episode:
            one = open_episode()
            address = one.url.removesuffix("/v1")
            async with anthropic.AsyncAnthropic(base_url=address, api_key=one.endpoint.key, max_retries=0) as client:
                return await use(client.messages, one.episode)

    return asyncio.run(run())


def test_a_dialogue_with_a_tool_is_one_sample_of_what_was_written(tokenizer):
    policy = said(CALL, "ten")(tokenizer)
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]

    async def use(messages, episode):
        options = {"model": "policy", "max_tokens": 200, "tools": TOOLS, "system": system}
        asked = await messages.create(messages=[QUESTION], **options)
        result = {"type": "tool_result", "tool_use_id": asked.content[1].id, "content": [{"type": "text", "text": "7"}]}
        dialogue = [
            QUESTION,
            {"role": "assistant", "content": asked.content},
            {"role": "user", "content": [result, {"type": "text", "text": "and then?"}]},
        ]
        return asked, await messages.create(messages=dialogue, **options), episode.samples()

    asked, answered, samples = served(policy, use)
    text, call = asked.content
    assert (text.type, text.text, call.type, call.name, call.input) == (
        "text", "let me see", "tool_use", "add", {"number": 2**70},
    )  # fmt: skip
    assert (asked.stop_reason, answered.stop_reason, answered.content[0].text) == ("tool_use", "end_turn", "ten")
    first, second = policy.written
    assert asked.usage.input_tokens == len(first.prompt_ids)
    assert asked.usage.output_tokens == len(first.generation.token_ids)
    shown = tokenizer.decode(second.prompt_ids)
    assert shown.index("Be brief.") < shown.index(CALL) < shown.index("tool\n7") < shown.index("user\nand then?")
    assert len(samples) == 1
    assert_trained_once_as_sampled(samples, policy.written)


def test_tokens_are_counted_as_the_next_request_has_them_and_leave_no_trace(tokenizer):
    import anthropic

    policy, counts = said(f"<think>Well, well.</think>{CALL}", "ten")(tokenizer), Counter()

    async def use(messages, episode):
        options = {"model": "policy", "tools": TOOLS, "system": "Be brief."}
        counted, used = [], []

        async def ask(dialogue):
            for one in ([*dialogue, {"role": "user", "content": "or this?"}], dialogue, dialogue):
                counted.append((await messages.count_tokens(messages=one, **options)).input_tokens)
            answer = await messages.create(messages=dialogue, max_tokens=200, **options)
            used.append(answer.usage.input_tokens)
            return answer

        asked = await ask([QUESTION])
        result = {"type": "tool_result", "tool_use_id": asked.content[1].id, "content": "7"}
        await ask([QUESTION, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}])
        long = await messages.count_tokens(messages=[{"role": "user", "content": "x" * 10**5}], **options)
        with pytest.raises(anthropic.BadRequestError, match="the last message is the assistant's"):
            await messages.count_tokens(messages=[QUESTION, {"role": "assistant", "content": "a"}], **options)
        return counted, used, long.input_tokens, episode.limit_tokens, episode.samples()

    counted, used, long, limit, samples = served(policy, use, counts)
    assert counted[1:3] == [used[0]] * 2 and counted[4:] == [used[1]] * 2 and used[0] < used[1]
    assert counted[0] > used[0] and counted[3] > used[1] and long > limit
    assert len(samples) == 1 and counts["requests"] == 2 and counts["continued_requests"] == 1
    assert not counts["divergences"] and not counts["context_overflows"] and counts["refused_requests"] == 1
    assert_trained_once_as_sampled(samples, policy.written)


def test_a_stream_tells_the_same_block_by_block(tokenizer):
    policy = said(CALL, CALL, "Grüße")(tokenizer)
    options = {"model": "policy", "max_tokens": 200, "messages": [QUESTION]}

    async def use(messages, episode):
        whole = await messages.create(tools=TOOLS, **options)
        async with messages.stream(tools=TOOLS, **options) as stream:
            kinds = [event.type async for event in stream]
        async with messages.stream(**options) as stream_of_text:
            texts = [text async for text in stream_of_text.text_stream]
        return whole, kinds, await stream.get_final_message(), texts

    whole, kinds, told, texts = served(policy, use)
    assert [(one.type, getattr(one, "text", None), getattr(one, "input", None)) for one in told.content] == [
        (one.type, getattr(one, "text", None), getattr(one, "input", None)) for one in whole.content
    ]
    assert (told.stop_reason, told.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert [kind for kind in kinds if kind.startswith("message_")] == ["message_start", "message_delta", "message_stop"]
    assert texts == ["Grüße"]


def test_how_an_answer_ended_is_told_as_anthropic_does(tokenizer):
    policy = said("one <stop> two", "abcdef", "end", "one <stop>")(tokenizer)

    async def use(messages, episode):
        options = {"model": "policy", "messages": [QUESTION]}
        stopped = await messages.create(max_tokens=50, stop_sequences=["never", "<stop>"], **options)
        cut = await messages.create(max_tokens=3, **options)
        ended = await messages.create(max_tokens=50, stop_sequences=["never"], **options)
        async with messages.stream(max_tokens=50, stop_sequences=["<stop>"], **options) as stream:
            streamed = await stream.get_final_message()
        return [(one.content[0].text, one.stop_reason, one.stop_sequence) for one in (stopped, cut, ended, streamed)]

    assert served(policy, use) == [
        ("one ", "stop_sequence", "<stop>"),
        ("abc", "max_tokens", None),
        ("end", "end_turn", None),
        ("one ", "stop_sequence", "<stop>"),
    ]


REFUSED = [
    ([], "messages is empty"),
    ([{"role": "user", "content": [{"type": "image", "source": {}}]}], "has a block of type 'image'"),
    ([QUESTION, {"role": "assistant", "content": "It is"}], "the last message is the assistant's"),
    ([{"role": "system", "content": "x"}], "role is neither user nor assistant"),
    ([{"role": "user", "content": 7}], "content is neither text nor a list of blocks"),
]


def test_what_cannot_be_served_is_refused_in_anthropic_s_form_and_counted(tokenizer):
    import anthropic

    counts = Counter()

    async def use(messages, episode):
        for dialogue, told in REFUSED:
            with pytest.raises(anthropic.BadRequestError) as refused:
                await messages.create(model="policy", max_tokens=5, messages=dialogue)
            assert refused.value.body["type"] == "error" and told in refused.value.body["error"]["message"]
        with pytest.raises(anthropic.NotFoundError) as refused:
            await messages.batches.list()
        assert "/v1/messages/batches is not served" in refused.value.body["error"]["message"]
        return episode.samples()

    assert served(said()(tokenizer), use, counts) == ()
    assert counts == {"refused_requests": len(REFUSED) + 1}


def test_what_an_agent_asks_for_and_reports_is_taken_as_with_openai(tokenizer):
    policy, counts = said('{"name": "add", "arguments": {"number": 7}}\n</tool_call>', "x")(tokenizer), Counter()

    async def use(messages, episode):
        options = {"model": "policy", "max_tokens": 200, "messages": [QUESTION]}
        called = await messages.create(tools=TOOLS, tool_choice={"type": "any"}, **options)
        await messages.create(extra_body={"temperature": 0.1}, **options)
        return called, episode.reward_turns({called.id: 0.5})

    called, rewards = served(policy, use, counts)
    assert [(block.type, getattr(block, "input", None)) for block in called.content] == [("tool_use", {"number": 7})]
    assert '"description": "adds"' in tokenizer.decode(policy.written[0].prompt_ids)
    assert (counts["overridden_sampling"], rewards) == (1, 0.5)
