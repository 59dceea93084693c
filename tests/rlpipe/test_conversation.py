"""Several turns with a tool, token by token; what cannot work is refused at the start."""

import asyncio
from dataclasses import replace

import pytest

from rlpipe.config.rollout import GenerateConfig
from rlpipe.generation.calculator import calculator, evaluate
from rlpipe.generation.conversation import Conversation, InterruptedResponse
from rlpipe.generation.filters import drop_reason, group_filters
from rlpipe.generation.generate_functions import generate_function, single_turn
from rlpipe.generation.prompt_requests import PromptRequest
from rlpipe.generation.stop_strings import before_stop
from rlpipe.prepare.tokenizer import byte_tokenizer
from rlpipe.shared.errors import ConfigError, RolloutError
from rlpipe.shared.sample import Prompt, Status, VersionSpan
from rollout.partial_response import PartialResponse
from rollout.requests import Generation, SamplingParameters, sample_seed
from tests.merging_tokenizer import merging_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


class Script:
    """Answers with given texts, one per request, under rising weight versions; None aborts."""

    def __init__(self, tokenizer, *texts, end=True) -> None:
        self.tokenizer, self.texts, self.end, self.requests = tokenizer, list(texts), end, []

    async def generate(self, request):
        self.requests.append(request)
        text, version = self.texts.pop(0), len(self.requests)
        if text is None:
            partial = request.partial.extended((5, 6), (-1.0, -1.0), version)
            return Generation(
                request.request_id, partial.token_ids, partial.logprobs, Status.ABORTED, partial.versions, 0, 0.0, 0
            )
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if self.end and not self.texts:
            ids += (self.tokenizer.eos_token_id,)
        ids = ids[: request.sampling.max_new_tokens]
        full = len(ids) == request.sampling.max_new_tokens
        status = Status.TRUNCATED if full else Status.COMPLETED
        return Generation(
            request.request_id, ids, (-0.5,) * len(ids), status, (VersionSpan(version, len(ids)),), 0, 0.1, 0
        )


def conversation_of(tokenizer, script, limit=64, partial=PartialResponse()):
    prompt = Prompt("p", "12+30=?", (1, 2, 3), "42", "data", {"expression": "12+30"})
    request = PromptRequest("g-0", "g", prompt, SamplingParameters(limit))
    return Conversation(request, script, tokenizer, 0, partial)


def test_tool_output_is_context_and_is_not_trained(tokenizer):
    script = Script(tokenizer, "<<12+30>>", "Answer: 42")
    conversation = conversation_of(tokenizer, script)
    asyncio.run(calculator(conversation))
    sample = conversation.sample()
    inserted = tokenizer(" = 42 ", add_special_tokens=False)["input_ids"]
    first = len(tokenizer("<<12+30>>", add_special_tokens=False)["input_ids"])
    assert sample.response_text == "<<12+30>> = 42 Answer: 42"
    assert sample.loss_mask[first : first + len(inserted)] == (0,) * len(inserted)
    assert sum(sample.loss_mask) == sample.response_tokens - len(inserted)
    assert sample.response_ids[first : first + len(inserted)] == tuple(inserted)
    assert len(sample.rollout_logprobs) == sample.response_tokens == sum(span.tokens for span in sample.versions)
    assert [span.version for span in sample.versions] == [1, 2]
    assert sample.status is Status.COMPLETED
    second = script.requests[1]
    assert second.prompt_ids == (1, 2, 3) + sample.response_ids[: first + len(inserted)]
    assert second.sampling.max_new_tokens == 64 - first - len(inserted)


@pytest.mark.parametrize(
    ("text", "stop"), [("one\n", "\n"), ("one\n\n", "\n"), ("one>>, ", ">>"), ("one </answer>.", "</answer>")]
)
def test_a_turn_that_a_stop_string_ended_is_not_the_response_whatever_its_last_token_goes_on_with(
    tokenizer, text, stop
):
    conversation = conversation_of(tokenizer, Script(tokenizer, text, "two"))

    async def write():
        assert await conversation.write(stop=("never", stop)) == text
        assert not conversation.finished
        await conversation.write(stop=("never", stop))

    asyncio.run(write())
    assert conversation.finished and len(conversation.turns) == 2


def test_the_calculator_answers_an_expression_whose_last_token_goes_on_after_it(tokenizer):
    conversation = conversation_of(tokenizer, Script(tokenizer, "so <<12+30>>, ", "Answer: 42"))
    asyncio.run(calculator(conversation))
    assert conversation.sample().response_text == "so <<12+30>>,  = 42 Answer: 42"


def test_the_calculator_answers_where_a_token_joins_the_end_of_an_expression_to_what_follows():
    tokenizer = merging_tokenizer([" <<12+30>>, so", "Answer: 42"])
    assert tokenizer.tokenize("<<12+30>>, so")[-2:] == [">>,", "Ġso"]
    conversation = conversation_of(tokenizer, Script(tokenizer, " <<12+30>>,", "Answer: 42"))
    asyncio.run(calculator(conversation))
    assert conversation.sample().response_text == " <<12+30>>, = 42 Answer: 42"


def test_each_run_of_tokens_is_decoded_once(tokenizer, monkeypatch):
    decoded = []
    decode = type(tokenizer).decode

    def counting(self, token_ids, **options):
        decoded.append(len(token_ids))
        return decode(self, token_ids, **options)

    monkeypatch.setattr(type(tokenizer), "decode", counting)
    conversation = conversation_of(tokenizer, Script(tokenizer, "Answer: 42"))
    asyncio.run(single_turn(conversation))
    assert conversation.sample().response_text == "Answer: 42"
    assert decoded == [len(conversation.sample().response_ids)]
    conversation = conversation_of(tokenizer, Script(tokenizer, "<<12+30>>", "Answer: 42"))
    asyncio.run(calculator(conversation))
    assert conversation.sample().response_text == "<<12+30>> = 42 Answer: 42"
    assert len(decoded) == 4 and conversation.sample().response_tokens == decoded[-1]


def test_what_the_engine_decoded_is_not_decoded_again(tokenizer, monkeypatch):
    class DecodingScript(Script):
        async def generate(self, request):
            generation = await super().generate(request)
            return replace(generation, text=f"as the engine has it, {len(generation.token_ids)} tokens")

    monkeypatch.setattr(type(tokenizer), "decode", None)
    conversation = conversation_of(tokenizer, DecodingScript(tokenizer, "Answer: 42"))
    asyncio.run(single_turn(conversation))
    assert conversation.sample().response_text == "as the engine has it, 11 tokens"


def test_a_response_that_ends_without_the_tool_is_one_turn(tokenizer):
    script = Script(tokenizer, "Answer: 42")
    conversation = conversation_of(tokenizer, script)
    asyncio.run(calculator(conversation))
    assert len(script.requests) == 1
    assert conversation.sample().trained_tokens == conversation.sample().response_tokens


def test_tool_output_beyond_the_limit_is_cut_and_ends_the_response(tokenizer):
    conversation = conversation_of(tokenizer, Script(tokenizer, "<<12+30>>", "x"), limit=10)
    asyncio.run(calculator(conversation))
    sample = conversation.sample()
    assert (sample.response_tokens, sample.status) == (10, Status.TRUNCATED)
    with pytest.raises(RolloutError, match="write\\(\\) after the response was finished"):
        asyncio.run(conversation.write())


def test_seconds_and_retractions_are_those_of_all_turns(tokenizer):
    class Retracted(Script):
        async def generate(self, request):
            return replace(await super().generate(request), retractions=2, seconds=0.25)

    conversation = conversation_of(tokenizer, Retracted(tokenizer, "<<12+30>>", "Answer: 42"))
    asyncio.run(calculator(conversation))
    assert conversation.sample().metadata == {"generate_seconds": 0.5, "retractions": 4, "writes": 2}


def test_a_turn_that_its_stop_ends_at_the_last_token_ends_the_response(tokenizer):
    class Stopped(Script):
        async def generate(self, request):
            return replace(await super().generate(request), status=Status.COMPLETED)

    turn = "<<12+30>>"
    tokens = len(tokenizer(turn, add_special_tokens=False)["input_ids"])
    conversation = conversation_of(tokenizer, Stopped(tokenizer, turn, "x"), limit=tokens)
    asyncio.run(conversation.write(stop=(">>",)))
    assert (conversation.status, conversation.remaining_tokens) == (Status.TRUNCATED, 0)


def test_an_interrupted_first_turn_can_go_on_and_a_later_one_starts_again(tokenizer):
    conversation = conversation_of(tokenizer, Script(tokenizer, None))
    with pytest.raises(InterruptedResponse):
        asyncio.run(single_turn(conversation))
    assert conversation.partial.token_ids == (5, 6)
    later = conversation_of(tokenizer, Script(tokenizer, "<<1+1>>", None, end=False))
    with pytest.raises(InterruptedResponse):
        asyncio.run(calculator(later))
    assert later.partial == PartialResponse()


def test_a_response_goes_on_from_what_it_has_in_its_first_turn_alone(tokenizer):
    script = Script(tokenizer, "<<12+30>>", "Answer: 42")
    begun = PartialResponse((5, 6), (-1.0, -1.0), (VersionSpan(1, 2),))
    asyncio.run(calculator(conversation_of(tokenizer, script, partial=begun)))
    assert [request.partial for request in script.requests] == [begun, PartialResponse()]
    assert [request.request_id for request in script.requests] == ["g-0", "g-0.1"]


def test_a_turn_is_drawn_with_numbers_that_follow_from_its_sample_and_the_tokens_before_it(tokenizer):
    def seeds(*inserted):
        script = Script(tokenizer, *["one"] * (len(inserted) + 1), end=False)
        conversation = conversation_of(tokenizer, script)
        for text in inserted:
            asyncio.run(conversation.write(final=False))
            conversation.insert(text)
        asyncio.run(conversation.write())
        return [request.seed for request in script.requests]

    drawn = seeds("a", "b", "b")
    assert drawn == seeds("a", "b", "b")
    assert drawn[0] == sample_seed(0, "g-0")
    assert len(set(drawn)) == 4
    other = seeds("a", "c", "b")
    assert [one == this for one, this in zip(drawn, other, strict=True)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 + 30", "42"),
        ("-(3 - 5) * 2", "4"),
        ("7/2", "3.5"),
        ("1/0", "?"),
        ("2**9", "?"),
        ("__import__('os')", "?"),
        ("(" * 99, "?"),
        ("9" * 300, "?"),
    ],
)
def test_the_calculator_knows_arithmetic_and_nothing_else(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "two_turns"}, "'two_turns' is unknown: use one of calculator, single_turn"),
        ({"function": "no_such_module:f"}, "cannot import 'no_such_module'"),
        ({"function": "math:sqrt"}, "is not an `async def` function"),
        ({"function": "calculator", "options": {"calls": 3}}, r"with the options \['calls'\]"),
    ],
)
def test_a_generate_function_that_cannot_work_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        generate_function(GenerateConfig(**settings))


def two_arguments(samples, config):
    return None


@pytest.mark.parametrize("name", ["easy", "no_such_module:f", f"{__name__}:two_arguments"])
def test_a_filter_that_cannot_work_is_refused(name):
    with pytest.raises(ConfigError, match="rollout.filters"):
        group_filters([name])


def test_the_first_filter_that_drops_gives_the_reason(tokenizer):
    script = Script(tokenizer, "Answer: 42")
    conversation = conversation_of(tokenizer, script)
    asyncio.run(single_turn(conversation))
    sample = conversation.sample()
    assert drop_reason([sample], group_filters(["truncated"])) is None
    assert drop_reason([sample], group_filters(["truncated", "equal_rewards"])) == "equal_rewards"


@pytest.mark.parametrize(
    ("text", "stop", "start", "expected"),
    [
        ("a</x>b</y>", ("</y>", "</x>"), 0, ("a", "</x>")),  # the first in the text, not in the list
        ("a</x>b</y>", ("</x>", "</y>"), 5, ("a</x>b", "</y>")),  # of what was sampled
        ("stop", ("stop",), 0, ("", "stop")),
        ("abc", ("ab", "abc"), 0, ("", "ab")),
        ("abc", ("x",), 0, ("abc", None)),
        ("abc", (), 0, ("abc", None)),
    ],
)
def test_a_text_ends_before_the_first_stop_string(text, stop, start, expected):
    assert before_stop(text, stop, start) == expected


def test_a_sample_has_the_temperature_that_it_was_drawn_with(tokenizer):
    request = PromptRequest("g-0", "g", Prompt("p", "", (1,), "", "data"), SamplingParameters(64, temperature=0.5))
    conversation = Conversation(request, Script(tokenizer, "Answer: 42"), tokenizer, 0)
    asyncio.run(single_turn(conversation))
    assert conversation.sample().temperature == 0.5


def test_engines_are_told_of_every_turn_when_it_is_wanted_and_how_long_it_will_be(tokenizer):
    script, prompt = Script(tokenizer, "<<12+30>>", "Answer: 42"), Prompt("p", "", (1,), "", "data")
    request = PromptRequest("g-0", "g", prompt, SamplingParameters(64), urgent=True, spare=True, expected_tokens=30)
    asyncio.run(calculator(Conversation(request, script, tokenizer, 0)))
    assert [(one.urgent, one.spare, one.expected_tokens) for one in script.requests] == [(True, True, 30)] * 2


def test_tool_output_that_fills_the_response_ends_it(tokenizer):
    limit = sum(len(tokenizer(one, add_special_tokens=False)["input_ids"]) for one in ("<<12+30>>", " = 42 "))
    script = Script(tokenizer, "<<12+30>>", "x")
    conversation = conversation_of(tokenizer, script, limit)
    asyncio.run(calculator(conversation))
    assert (conversation.status, conversation.remaining_tokens, len(script.requests)) == (Status.TRUNCATED, 0, 1)


def test_what_is_read_counts_to_the_weights_that_wrote_last_before_it(tokenizer):
    conversation = conversation_of(tokenizer, Script(tokenizer, "a", "b", "c", end=False))
    for _ in range(2):
        asyncio.run(conversation.write(final=False))
        conversation.insert_tokens((7, 8))
    assert conversation.sample().versions == (VersionSpan(1, 3), VersionSpan(2, 3))


def test_the_sequence_of_the_last_turn_is_the_last_of_its_episode(tokenizer):
    first = conversation_of(tokenizer, Script(tokenizer, "a", "b", "c", end=False))
    for number, one in enumerate((first, first.beside("x"), first)):
        asyncio.run(one.write(final=False))
        one.describe_turn(number=number)
    assert [sample.sample_id for sample in first.episode()] == ["g-0.x", "g-0"]
