"""OpenAI's own client against the endpoint: what is trained is what was sampled, whatever an agent does."""

import asyncio
import json
import random
from collections import Counter

import openai
import pytest
from agent_support import TOOLS, serving
from random_policy_engine import TEXTS, RandomPolicy, assert_trained_once_as_sampled

from rlpipe.shared.sample import Status
from rollout.requests import sample_seed


class Dialogue:
    """Random things that agents do, through OpenAI's client."""

    def __init__(self, served, numbers: random.Random) -> None:
        self.served, self.numbers = served, numbers
        self.messages: list[dict] = [{"role": "user", "content": self.text()}]
        if numbers.random() < 0.5:
            self.messages.insert(0, {"role": "system", "content": self.text()})
        self.tools = TOOLS if numbers.random() < 0.7 else None

    def text(self) -> str:
        return self.numbers.choice(TEXTS) + self.numbers.choice(TEXTS)

    async def turn(self) -> None:
        options = {"tools": self.tools} if self.tools else {}
        choice = self.numbers.choice(["auto", "auto", "none", "required"]) if self.tools else None
        options |= {"tool_choice": choice} if choice else {}
        options |= {"max_tokens": 12} if self.numbers.random() < 0.2 else {}
        options |= {"stop": ["a"]} if self.numbers.random() < 0.2 else {}
        count = 2 if self.numbers.random() < 0.15 else 1
        answers = await self.ask(options | {"n": count})
        self.answer(self.numbers.choice(answers))

    async def ask(self, options) -> list[dict]:
        if options["n"] == 1 and self.numbers.random() < 0.3:
            return [await self.stream(options)]
        completion = await self.served.chat(self.messages, **options)
        return [choice.message.model_dump(exclude_none=True) for choice in completion.choices]

    async def stream(self, options) -> dict:
        message: dict = {"role": "assistant", "content": "", "tool_calls": []}
        async for chunk in await self.served.chat(self.messages, stream=True, **options):
            for choice in chunk.choices:
                message["content"] += choice.delta.content or ""
                message["tool_calls"] += [one.model_dump(exclude={"index"}) for one in choice.delta.tool_calls or ()]
        if not message["tool_calls"]:
            del message["tool_calls"]
        return message

    def answer(self, message: dict) -> None:
        """The agent takes the reply up, in a form of its own, and says something back."""
        message.pop("reasoning_content", None)
        for call in message.get("tool_calls", ()):
            if self.numbers.random() < 0.5:
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        if message.get("content") and self.numbers.random() < 0.3:
            message["content"] = [{"type": "text", "text": message["content"]}]
        self.messages.append(message)
        for call in message.get("tool_calls", ()):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": self.text() * 20})
        if not message.get("tool_calls"):
            self.messages.append({"role": "user", "content": self.text()})

    def rewrite(self) -> None:
        """What opens a branch: an edit, a step back, another system prompt, a summary in place of the beginning."""
        what = self.numbers.randrange(4)
        if what == 0:
            place = self.numbers.randrange(len(self.messages))
            self.messages[place] = {**self.messages[place], "content": self.text() + " edited"}
        elif what == 1:
            users = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
            del self.messages[self.numbers.choice(users) + 1 :]
        elif what == 2:
            self.messages = [{"role": "system", "content": self.text()}, *self.messages[-1:]]
            self.messages[-1] = {"role": "user", "content": self.text()}
        else:
            self.messages = [{"role": "user", "content": f"summary: {self.text()}"}]


async def _random_dialogue(open_episode, policy, seed: int) -> Counter:
    served, numbers = open_episode(f"g-{seed:03d}"), random.Random(seed)
    begun = len(policy.written)
    dialogue = Dialogue(served, numbers)
    for _ in range(numbers.randint(2, 6)):
        await dialogue.turn()
        if numbers.random() < 0.25:
            dialogue.rewrite()
    samples = served.episode.samples()
    assert_trained_once_as_sampled(samples, policy.written[begun:])
    assert len({sample.sample_id for sample in samples}) == len(samples)
    assert {sample.episode for sample in samples} == {f"g-{seed:03d}"}
    for sample in samples:
        assert sum(span.tokens for span in sample.versions) == sample.response_tokens == len(sample.loss_mask)
        assert all(
            sample.loss_mask[turn.start : turn.end].count(1) in (0, turn.end - turn.start) for turn in sample.turns
        )
    return Counter(branches=len(samples), dialogues=1, shared=sum(sample.shared_tokens for sample in samples))


def served(tokenizer, policy, use, **settings):
    """What `use` of an endpoint gives."""

    async def run():
        async with serving(tokenizer, policy, **settings) as open_episode:
            return await use(open_episode)

    return asyncio.run(run())


async def _random_dialogues(open_episode, policy, seeds) -> Counter:
    return sum([await _random_dialogue(open_episode, policy, seed) for seed in seeds], Counter())


def test_trained_tokens_are_the_sampled_ones_over_200_random_dialogues(any_tokenizer):
    counts, policy = Counter(), RandomPolicy(any_tokenizer)
    found = served(
        any_tokenizer,
        policy,
        lambda open_episode: _random_dialogues(open_episode, policy, range(200)),
        limit=20_000,
        counts=counts,
    )
    assert found["branches"] > found["dialogues"] and found["shared"] > 0
    assert counts["continued_requests"] > 200 and counts["divergences"] > 50
    assert counts["tool_calls"] > 50 and counts["malformed_tool_calls"] > 20 and counts["special_text_requests"] > 50
    assert counts["refused_requests"] == 0


def said(*texts):
    """A policy that writes these texts, in turn."""

    class Said(RandomPolicy):
        def text(self, numbers):
            return waiting.pop(0)

        def broken_text(self, numbers):
            return []

    waiting = list(texts)
    return Said


def test_only_what_is_new_is_rendered_and_kept_tokens_are_never_tokenized_again(tokenizer):
    policy = said("\u212b <|im_end|> ", "more")(tokenizer)
    policy.encode = lambda text: tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    async def use(open_episode):
        one = open_episode()
        messages = [{"role": "user", "content": "hello"}]
        reply = (await one.chat(messages)).choices[0].message
        await one.chat([*messages, reply, {"role": "user", "content": "go <|im_end|> on"}])
        return one.episode.samples()

    (sample,) = served(tokenizer, policy, use)
    first, second = policy.written
    assert tokenizer.decode(first.prompt_ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    kept = first.prompt_ids + first.generation.token_ids
    assert second.prompt_ids[: len(kept)] == kept
    added = second.prompt_ids[len(kept) :]
    assert tokenizer.decode(added) == "\n<|im_start|>user\ngo <|im_end|> on<|im_end|>\n<|im_start|>assistant\n"
    assert list(added).count(tokenizer.eos_token_id) == 1
    assert sample.prompt.token_ids == first.prompt_ids and sample.temperature == 0.7
    assert [turn.number for turn in sample.turns] == [0, 1]
    assert sample.response_text == "more"


def test_a_reply_that_a_limit_cut_off_is_ended_by_the_template_where_it_goes_on(tokenizer):
    policy = said("abcdef", "g")(tokenizer)

    async def use(open_episode):
        one = open_episode()
        messages = [{"role": "user", "content": "x"}]
        reply = await one.chat(messages, max_tokens=3)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("abc", "length")
        await one.chat([*messages, reply.choices[0].message, {"role": "user", "content": "y"}])
        return one.episode.samples()

    (sample,) = served(tokenizer, policy, use)
    assert tokenizer.decode(sample.response_ids).startswith("abc<|im_end|>\n<|im_start|>user\ny")
    assert sample.status is Status.COMPLETED
    assert sum(sample.loss_mask) == 3 + 2


def test_branches_are_opened_counted_and_told_with_the_first_message_that_differs(tokenizer):
    counts, policy = Counter(), RandomPolicy(tokenizer)

    async def use(open_episode):
        one = open_episode()
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
        for text in ("b", "c"):
            messages += [(await one.chat(messages)).choices[0].message.model_dump(), {"role": "user", "content": text}]
        await one.chat(messages)
        await one.chat([*messages[:3], {"role": "user", "content": "not b"}])
        await one.chat([{"role": "system", "content": "other"}, *messages[1:]])
        return one.episode

    episode = served(tokenizer, policy, use, counts=counts)
    samples = episode.samples()
    assert (counts["requests"], counts["continued_requests"], counts["divergences"]) == (5, 2, 2)
    assert episode.divergences == [
        "message 3 was user 'b' and is now user 'not b'",
        "message 0 was system 's' and is now system 'other'",
    ]
    assert [len(sample.turns) for sample in samples] == [3, 2, 1]
    assert [sample.shared_tokens > 0 for sample in samples] == [True, False, False]
    assert samples[0].loss_mask[samples[0].turns[0].start] == 0 and samples[1].loss_mask[samples[1].turns[0].start] == 1
    assert all(sample.metadata["divergences"] == tuple(episode.divergences) for sample in samples)
    assert_trained_once_as_sampled(samples, policy.written)


def test_side_by_side_requests_are_branches(tokenizer):
    policy = RandomPolicy(tokenizer, seconds=0.01)

    async def use(open_episode):
        one = open_episode()
        questions = [[{"role": "system", "content": f"agent {n}"}, {"role": "user", "content": "x"}] for n in range(5)]
        await asyncio.gather(*(one.chat(messages) for messages in questions))
        return one.episode.samples()

    samples = served(tokenizer, policy, use)
    assert len(samples) == 5 and len({sample.prompt.token_ids for sample in samples}) == 5
    assert_trained_once_as_sampled(samples, policy.written)


def test_tool_calls_reach_the_agent_and_malformed_ones_as_text(tokenizer):
    call = '<tool_call>\n{"name": "add", "arguments": {"number": 4}}\n</tool_call>'
    policy = said(f"let me see {call}", call[:-13], call.replace("add", "mul"), call)(tokenizer)
    counts = Counter()

    async def use(open_episode):
        one = open_episode()
        ask = [{"role": "user", "content": "x"}]
        found = [(await one.chat(ask, tools=TOOLS)).choices[0] for _ in range(3)]
        return [*found, (await one.chat(ask, tools=TOOLS, tool_choice="none")).choices[0]]

    good, broken, unknown, unasked = served(tokenizer, policy, use, counts=counts)
    assert (good.finish_reason, good.message.content) == ("tool_calls", "let me see")
    (made,) = good.message.tool_calls
    assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"number": 4})
    for choice, text in ((broken, call[:-13]), (unknown, call.replace("add", "mul")), (unasked, call)):
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", text, None)
    assert (counts["tool_calls"], counts["malformed_tool_calls"]) == (1, 2)


def test_a_required_tool_is_begun_for_the_policy_and_its_beginning_is_not_trained(tokenizer):
    policy = said('{"number": 7}}\n</tool_call>')(tokenizer)

    async def use(open_episode):
        one = open_episode()
        choice = {"type": "function", "function": {"name": "add"}}
        answer = await one.chat([{"role": "user", "content": "x"}], tools=TOOLS, tool_choice=choice)
        return answer.choices[0].message, one.episode.samples()

    message, (sample,) = served(tokenizer, policy, use)
    assert json.loads(message.tool_calls[0].function.arguments) == {"number": 7}
    assert tokenizer.decode(sample.prompt.token_ids).endswith('<tool_call>\n{"name": "add", "arguments": ')
    assert sample.trained_tokens == sample.response_tokens == len(policy.written[0].generation.token_ids)


def test_streams_and_log_probabilities_tell_what_was_sampled(tokenizer):
    policy = said("Grüße", "one <stop> two", "text")(tokenizer)

    async def use(open_episode):
        one = open_episode()
        ask = [{"role": "user", "content": "x"}]
        options = {"stream": True, "logprobs": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await one.chat(ask, **options)]
        stopped = (await one.chat(ask, stop="<stop>")).choices[0]
        plain = await one.client.completions.create(model="policy", prompt="go", logprobs=1)
        return chunks, stopped, plain

    chunks, stopped, plain = served(tokenizer, policy, use)
    first = policy.written[0].generation
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Grüße"
    logprobs = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices and chunk.choices[0].logprobs]
    told = [entry.logprob for one in logprobs for entry in one.content]
    assert told == list(first.logprobs)
    assert chunks[-1].usage.completion_tokens == len(first.token_ids)
    assert (stopped.message.content, stopped.finish_reason) == ("one ", "stop")
    assert plain.choices[0].text == "text"
    assert plain.choices[0].logprobs.token_logprobs == list(policy.written[2].generation.logprobs)


@pytest.mark.parametrize("stop", ["\n", ["never", " 5", "\nObservation:"], "\nObs"])
def test_a_text_ends_before_the_first_stop_string_whatever_its_last_token_goes_on_with(tokenizer, stop):
    policy = said(*["look\nObservation: 5"] * 8)(tokenizer)

    async def use(open_episode):
        one = open_episode()
        for _ in range(4):  # which go on after it by nought to two characters
            (chat,) = (await one.chat([{"role": "user", "content": "x"}], stop=stop)).choices
            (plain,) = (await one.client.completions.create(model="policy", prompt="go", stop=stop)).choices
            assert (chat.message.content, chat.finish_reason) == ("look", "stop")
            assert (plain.text, plain.finish_reason) == ("look", "stop")

    served(tokenizer, policy, use)
    lengths = {len(one.generation.token_ids) for one in policy.written}
    assert len(lengths) > 1, "no token went on after a stop string"


def test_a_plain_completion_tells_how_it_ended_and_its_stream_what_it_took(tokenizer):
    policy = said("one", "abcdef", "two")(tokenizer)

    async def use(open_episode):
        one = open_episode()
        ended = await one.client.completions.create(model="policy", prompt="go")
        cut = await one.client.completions.create(model="policy", prompt="go", max_tokens=3)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await one.client.completions.create(model="policy", prompt="go", **options)]
        return ended.choices[0], cut.choices[0], chunks

    ended, cut, chunks = served(tokenizer, policy, use)
    assert (ended.text, ended.finish_reason) == ("one", "stop")
    assert (cut.text, cut.finish_reason) == ("abc", "length")
    assert [choice.text for chunk in chunks for choice in chunk.choices] == ["two"]
    assert chunks[-1].usage.completion_tokens == len(policy.written[2].generation.token_ids)


def test_plain_completions_go_on_from_kept_tokens_given_as_text_or_as_ids(tokenizer):
    policy = said("one", "two", "three")(tokenizer)

    async def use(open_episode):
        one = open_episode()
        text = "go:"
        for more in ("<|im_end|> and", " then"):
            answer = await one.client.completions.create(model="policy", prompt=text)
            text += answer.choices[0].text + more
        ids = policy.written[-1].prompt_ids + policy.written[-1].generation.token_ids + (5, 6)
        await one.client.completions.create(model="policy", prompt=list(ids))
        return one.episode.samples()

    (sample,) = served(tokenizer, policy, use)
    assert tokenizer.decode(sample.response_ids[:-2]).startswith("one<|im_end|> andtwo<|im_end|>")
    assert_trained_once_as_sampled([sample], policy.written)


class Drawn(RandomPolicy):
    """Remembers seeds, too."""

    def __init__(self, tokenizer) -> None:
        super().__init__(tokenizer)
        self.seeds: list[int] = []

    async def generate(self, request):
        self.seeds.append(request.seed)
        return await super().generate(request)


def test_every_response_is_drawn_by_itself_and_the_same_requests_are_drawn_alike(tokenizer):
    def seeds(name: str) -> list[int]:
        policy = Drawn(tokenizer)

        async def use(open_episode):
            client = open_episode(name).client
            await client.completions.create(model="policy", prompt=[1])
            ids = [*policy.written[0].prompt_ids, *policy.written[0].generation.token_ids]
            for more in (5, 6):
                await client.completions.create(model="policy", prompt=[*ids, more])
            await client.completions.create(model="policy", prompt=[1])
            await client.completions.create(model="policy", prompt=[1], seed=3, n=2)

        served(tokenizer, policy, use)
        return policy.seeds

    drawn = seeds("g-000")
    assert drawn == seeds("g-000")
    assert drawn[0] == sample_seed(0, "g-000")
    assert len({*drawn, *seeds("g-001")}) == 12


NESTED = {"function": {"name": "x", "arguments": '{"a":' * 500 + "1" + "}" * 500}}
REFUSED = [
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "admin", "content": "x"}]}, "use one of system"),
    ({"messages": [{"role": "user<|im_end|>", "content": "x"}]}, "use one of system"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text alone"),
    ({"messages": [{"role": "user", "content": "\U0010fffe"}]}, "not a character"),
    ({"n": 0}, "from 1 to 128"),
    ({"max_tokens": "9"}, "give a whole number"),
    ({"response_format": {"type": "json_object"}}, "without a grammar"),
    ({"response_format": {"type": "grammar"}}, "use text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "no JSON schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}}, "no JSON schema"),
    ({"top_logprobs": 3, "logprobs": True}, "of the sampled tokens alone"),
    ({"logit_bias": {"5": 1}}, "would change what is sampled"),
    ({"tool_choice": "required"}, "there are no tools"),
    ({"tools": TOOLS, "tool_choice": {"function": {"name": {}}}}, "none of the tools"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]}, "tool_calls"),
    ({"tools": [{"name": "x"}]}, "is no function"),
    ({"stop": [1]}, "a list of at most"),
    ({"stop": 5}, "a list of at most"),
    ({"messages": [{"role": "assistant", "tool_calls": [NESTED]}]}, "cannot be written again"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "maximum context length is 4096"),
]


def test_what_cannot_be_served_is_refused_in_a_sentence_and_counted(tokenizer):
    counts = Counter()

    async def use(open_episode):
        one = open_episode()
        url, headers = f"{one.url}/chat/completions", {"authorization": f"Bearer {one.endpoint.key}"}
        for body, message in REFUSED:
            request = {"model": "policy", "messages": [{"role": "user", "content": "x"}], **body}
            answer = await one.client._client.post(url, json=request, headers=headers)
            assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false"), body
            assert message in answer.json()["error"]["message"]
        assert one.episode.samples() == ()

    served(tokenizer, RandomPolicy(tokenizer), use, counts=counts)
    assert counts == {"refused_requests": len(REFUSED), "context_overflows": 1}


SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}, "words": {"$ref": "#/$defs/words"}},
    "required": ["sum"],
    "$defs": {"words": {"type": "array", "items": {"type": "string"}}},
}
ELSEWHERE = {"$ref": "http://127.0.0.1:9/schema.json"}


def test_a_request_for_json_is_answered_as_the_policy_writes_and_counted_where_that_is_allowed(tokenizer):
    texts = ('{"sum": 5, "words": ["ü"]}', '{"sum": "5"}', "five", "[1]", '{"any": 1}', "7")
    asked = [("json_schema", SUM)] * 3 + [("json_object", None)] * 2 + [("json_schema", ELSEWHERE)]
    policy, counts = said(*texts)(tokenizer), Counter()

    async def use(open_episode):
        one = open_episode()
        for kind, schema in asked:
            form = {"type": kind} | ({"json_schema": {"name": "a", "schema": schema}} if schema else {})
            yield (await one.chat([{"role": "user", "content": kind}], response_format=form)).choices[0].message.content
        assert_trained_once_as_sampled(one.episode.samples(), policy.written)

    async def all_of(open_episode):
        return [text async for text in use(open_episode)]

    assert served(tokenizer, policy, all_of, counts=counts, formats="unenforced") == list(texts)
    assert (counts["unenforced_formats"], counts["unfit_responses"], counts["refused_requests"]) == (6, 4, 0)


def test_an_episode_is_served_with_its_key_at_its_address_until_it_is_closed(tokenizer):
    async def use(open_episode):
        one = open_episode()
        assert [model.id async for model in one.client.models.list()] == ["policy"]
        with pytest.raises(openai.AuthenticationError):
            await one.client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.NotFoundError, match="/v1/embeddings is not served"):
            await one.client.embeddings.create(model="policy", input="x")
        one.endpoint.close_episode(one.url)
        with pytest.raises(openai.NotFoundError, match="or it is over"):
            await one.chat([{"role": "user", "content": "x"}])

    served(tokenizer, RandomPolicy(tokenizer), use)


async def abandon(one, messages, counts):
    """Asks for an answer and does not wait for it."""
    with pytest.raises(openai.APITimeoutError):
        await one.chat(messages, timeout=0.05)
    while not counts["abandoned_responses"]:
        await asyncio.sleep(0.01)


def test_an_answer_that_nobody_waits_for_is_not_part_of_the_episode(tokenizer):
    policy, counts = RandomPolicy(tokenizer, seconds=0.3), Counter()

    async def use(open_episode):
        one = open_episode()
        ask = [{"role": "user", "content": "x"}]
        await abandon(one, ask, counts)
        await one.chat(ask)
        return one.episode.samples()

    (sample,) = served(tokenizer, policy, use, counts=counts)
    assert len(policy.written) == 2
    assert sample.response_ids == policy.written[1].generation.token_ids != policy.written[0].generation.token_ids


def test_an_answer_that_was_taken_back_is_not_gone_on_from(tokenizer):
    """An agent that read it elsewhere, in a log for instance, begins anew with it."""
    policy, counts = said("one", "two")(tokenizer, seconds=0.3), Counter()

    async def use(open_episode):
        one = open_episode()
        ask = [{"role": "user", "content": "x"}]
        await abandon(one, ask, counts)
        await one.chat([*ask, {"role": "assistant", "content": "one"}, {"role": "user", "content": "y"}])
        return one.episode.samples()

    (sample,) = served(tokenizer, policy, use, counts=counts)
    assert counts["continued_requests"] == 0
    assert tokenizer.decode(sample.response_ids) == "two<|im_end|>" and "one" in sample.prompt.text


def test_what_an_agent_asks_for_otherwise_than_the_policy_is_trained_is_counted(tokenizer):
    """Its sampling is not followed, and text of special tokens stays text."""
    counts = Counter()

    async def use(open_episode):
        one, seen = open_episode(), []
        for content, temperature in (("x", 0.7), ("y", 0.2), ("a <|im_end|> b", 0.7)):
            await one.chat([{"role": "user", "content": content}], temperature=temperature)
            seen.append((counts["overridden_sampling"], counts["special_text_requests"]))
        return seen

    assert served(tokenizer, RandomPolicy(tokenizer), use, counts=counts) == [(0, 0), (1, 0), (1, 1)]


def test_plain_completions_that_do_not_go_on_or_do_so_twice_are_branches(tokenizer):
    policy, counts = said("one", "two", "three", "four")(tokenizer), Counter()

    async def use(open_episode):
        one, seen = open_episode(), []
        for prompt in ("go:", "go:one and", "go:one then", "elsewhere"):
            await one.client.completions.create(model="policy", prompt=prompt)
            seen.append((counts["continued_requests"], counts["divergences"]))
        return seen

    assert served(tokenizer, policy, use, counts=counts) == [(0, 0), (1, 0), (1, 1), (1, 2)]


def test_choices_that_are_asked_for_again_are_drawn_anew(tokenizer):
    policy = Drawn(tokenizer)

    async def use(open_episode):
        client = open_episode().client
        for _ in range(2):
            await client.completions.create(model="policy", prompt=[1], n=2)

    served(tokenizer, policy, use)
    assert len(policy.seeds) == len(set(policy.seeds)) == 4


def test_a_limit_that_is_null_is_that_of_the_other_name(tokenizer):
    policy = said("abcdef", "abcdef")(tokenizer)

    async def use(open_episode):
        one, ask = open_episode(), [{"role": "user", "content": "x"}]
        for limits in ({"max_completion_tokens": None, "max_tokens": 3}, {"max_completion_tokens": 2, "max_tokens": 3}):
            yield (await one.chat(ask, **limits)).choices[0].message.content

    async def all_of(open_episode):
        return [text async for text in use(open_episode)]

    assert served(tokenizer, policy, all_of) == ["abc", "ab"]


@pytest.mark.parametrize("arguments", [None, "", "{ }"])
def test_a_call_without_arguments_is_the_same_however_an_agent_says_so(tokenizer, arguments):
    policy = said('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', "seven")(tokenizer)
    counts = Counter()

    async def use(open_episode):
        one, ask = open_episode(), [{"role": "user", "content": "x"}]
        (call,) = (await one.chat(ask, tools=TOOLS)).choices[0].message.tool_calls
        again = {"id": call.id, "type": "function", "function": {"name": "add", "arguments": arguments}}
        result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
        await one.chat([*ask, {"role": "assistant", "content": None, "tool_calls": [again]}, result], tools=TOOLS)

    served(tokenizer, policy, use, counts=counts)
    assert (counts["continued_requests"], counts["divergences"]) == (1, 0)


def test_a_stream_tells_reasoning_and_each_of_several_calls(tokenizer):
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    policy = said(f"<think>hm</think>{call}{call}")(tokenizer)

    async def use(open_episode):
        chunks = await open_episode().chat([{"role": "user", "content": "x"}], tools=TOOLS, stream=True)
        return [chunk.choices[0].delta async for chunk in chunks]

    deltas = served(tokenizer, policy, use)
    assert [delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning_content")] == ["hm"]
    calls = [one for delta in deltas for one in delta.tool_calls or ()]
    assert [one.index for one in calls] == [0, 1] and len({one.id for one in calls}) == 2


def test_an_answer_tells_how_many_tokens_of_its_prompt_were_kept(tokenizer):
    policy = said("one", "two")(tokenizer)

    async def use(open_episode):
        one, ask = open_episode(), [{"role": "user", "content": "x"}]
        first = (await one.chat(ask)).usage
        more = [{"role": "assistant", "content": "one"}, {"role": "user", "content": "y"}]
        return first, (await one.chat([*ask, *more])).usage

    first, second = served(tokenizer, policy, use)
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == first.total_tokens < second.prompt_tokens


def test_a_plain_completion_that_was_taken_back_is_not_gone_on_from(tokenizer):
    policy, counts = said("one", "two")(tokenizer, seconds=0.3), Counter()

    async def use(open_episode):
        one = open_episode()
        with pytest.raises(openai.APITimeoutError):
            await one.client.completions.create(model="policy", prompt="go:", timeout=0.05)
        while not counts["abandoned_responses"]:
            await asyncio.sleep(0.01)
        await one.client.completions.create(model="policy", prompt="go:one and")
        return one.episode.samples()

    (sample,) = served(tokenizer, policy, use, counts=counts)
    assert counts["continued_requests"] == 0 and tokenizer.decode(sample.response_ids) == "two<|im_end|>"


def test_a_prompt_may_stand_alone_in_a_list(tokenizer):
    policy = said("one", "two", "three")(tokenizer)

    async def use(open_episode):
        one = open_episode()
        url, headers = f"{one.url}/completions", {"authorization": f"Bearer {one.endpoint.key}"}
        for prompt, status in ((["go"], 200), ([[5, 6]], 200), (["go", "on"], 400)):
            assert (await one.client._client.post(url, json={"prompt": prompt}, headers=headers)).status_code == status
        return [written.prompt_ids for written in policy.written]

    assert served(tokenizer, policy, use) == [tuple(policy.encode("go")), (5, 6)]


def test_a_message_that_is_refused_is_named_by_its_place_in_the_dialogue(tokenizer):
    async def use(open_episode):
        one, ask = open_episode(), [{"role": "user", "content": "x"}]
        reply = (await one.chat(ask)).choices[0].message.model_dump(exclude_none=True)
        with pytest.raises(openai.BadRequestError) as refused:
            await one.chat([*ask, reply, {"role": "admin", "content": "y"}])
        return refused.value.message

    assert "messages[2].role is 'admin'" in served(tokenizer, said("one")(tokenizer), use)
