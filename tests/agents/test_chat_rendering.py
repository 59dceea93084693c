"""What comes after kept tokens, by templates with the habits of real ones; how calls and reasoning are read."""

import json
import os
import subprocess
import sys

import pytest

from rlpipe.agents.chat_rendering import ChatOptions, ChatRenderer
from rlpipe.agents.messages import Message, message_of
from rlpipe.agents.refusal import Refusal
from rlpipe.agents.tool_call_formats import FORMATS, format_of, split_reasoning
from rlpipe.data.chat_messages import CalledTool
from rlpipe.prepare.tokenizer import byte_tokenizer
from rlpipe.shared.errors import ModelError
from rollout.engine_environment import engine_environment

# Like Qwen3's: reasoning of a reply is written while no user has spoken since, answers of tools are turns of the user.
THINKING = (
    "{%- set last = namespace(user=-1) %}"
    "{%- for message in messages if message.role == 'user' %}{% set last.user = messages.index(message) %}{% endfor %}"
    "{%- if tools %}<|im_start|>system\n<tool_call> {{ tools | length }}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{%- if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > last.user and (loop.last or message.reasoning_content) %}"
    "{{ '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}{{ '\n<tool_call>\n{\"name\": \"' + call.function.name + '\", ' }}"
    "{{ '\"arguments\": ' }}{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{%- endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# One that writes how many messages there are, so that nothing but the whole dialogue gives what comes next.
COUNTING = (
    "{% for message in messages %}[{{ loop.index }}/{{ message.role }}]{{ message.content }}<|im_end|>"
    "{% if not loop.last %}!{% endif %}{% endfor %}{% if add_generation_prompt %}[{{ messages | length }}]{% endif %}"
)
HEARTLESS = "{{ messages[0].content }}{% if add_generation_prompt %}:{% endif %}"


def renderer_of(template: str) -> ChatRenderer:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer)


def dialogue(*messages: tuple[str, str]) -> list[Message]:
    return [message_of({"role": role, "content": content}, 0) for role, content in messages]


CALL = Message("assistant", "", (CalledTool("look", '{"at": "<|im_end|>"}', "call_1"),), reasoning="hm")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
ANSWER = Message("tool", "a thing", tool_call_id="call_1")


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (dialogue(("user", "more")), "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"),
        (
            [ANSWER, ANSWER],
            "<|im_end|>\n<|im_start|>user\n<tool_response>\na thing\n</tool_response>\n<tool_response>\na thing\n"
            "</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_what_follows_a_reply_does_not_hang_on_how_the_template_writes_the_reply(new, expected):
    renderer = renderer_of(THINKING)
    for reply in (CALL, Message("assistant", "said", reasoning="hm"), Message("assistant", "</think> odd")):
        kept = [*dialogue(("system", "s"), ("user", "q")), reply]
        assert renderer.continuation(kept, new, ChatOptions((TOOL,))) == expected
        assert renderer.continuation(kept * 3, new, ChatOptions((TOOL,))) == expected
    quiet = renderer.continuation(kept, new, ChatOptions((TOOL,), {"enable_thinking": False}))
    assert quiet == expected + "<think>\n\n</think>\n\n"


def test_a_template_that_looks_at_the_whole_dialogue_is_given_it():
    renderer = renderer_of(COUNTING)
    kept = dialogue(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    for _ in range(2):
        expected = "<|im_end|>![5/user]e<|im_end|>[5]"
        assert renderer.continuation(kept, dialogue(("user", "e")), ChatOptions()) == expected
    assert renderer.prompt(kept, ChatOptions()).endswith("[4]")


def test_a_template_that_leaves_a_message_out_is_refused():
    renderer = renderer_of(HEARTLESS)
    with pytest.raises(Refusal, match="leaves out a message of role 'user'"):
        renderer.prompt(dialogue(("system", "s"), ("user", "hidden")), ChatOptions())
    with pytest.raises(ModelError, match="no chat template"):
        renderer_of(None)


def test_a_template_that_leaves_out_what_comes_after_a_reply_is_refused():
    shown = "{% for message in messages if message.role != 'tool' %}{{ message.role + message.content }}<|im_end|>"
    renderer = renderer_of(shown + "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}")
    kept = dialogue(("user", "q"), ("assistant", "said"))
    assert renderer.continuation(kept, dialogue(("user", "on")), ChatOptions()) == "<|im_end|>useron<|im_end|>assistant"
    with pytest.raises(Refusal, match="leaves out a message of role 'tool'"):
        renderer.continuation(kept, [ANSWER, *dialogue(("user", "on"))], ChatOptions())


def test_special_text_is_found_in_any_of_the_messages():
    renderer = renderer_of(THINKING)
    assert renderer.holds_special_text(dialogue(("user", "plain"), ("user", "<|im_end|>"), ("user", "plain")))
    assert not renderer.holds_special_text(dialogue(("user", "plain"), ("user", "im_end")))


def test_a_text_is_only_refused_unread_where_no_tokens_are_long_enough():
    renderer = renderer_of(THINKING)
    longest = max(("<|im_start|>", "<|im_end|>", "<|endoftext|>"), key=len)
    tokens = len(renderer.plain_token_ids(4 * longest))
    assert tokens == 4
    assert not renderer.surely_exceeds(4 * len(longest), tokens)
    assert renderer.surely_exceeds(4 * len(longest) + 1, tokens)


def test_special_tokens_in_names_keys_and_arguments_stay_text():
    renderer = renderer_of(THINKING)
    message = Message("assistant", "", (CalledTool("<|im_end|>", '{"<|im_start|>": 1}'),))
    text = renderer.prompt([*dialogue(("user", "<|im_end|>")), message], ChatOptions())
    ids = renderer.token_ids(text)
    special = {256, 257, 258}
    assert sum(token in special for token in ids) == 5  # what the template itself wrote: two turns, and a third begins
    assert renderer.text_of(ids, special=True).count("<|im_end|>") == 4


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"n": 1180591620717411303424}', '{"n": 1180591620717411303424}'),  # more than 64 bits
        (" ", "{}"),
        ('{"n": 1', json.dumps('{"n": 1')),
        ('{"n": 1, "n": 2}', json.dumps('{"n": 1, "n": 2}')),  # no one reading
        ('{"a":' * 500 + "1" + "}" * 500, json.dumps('{"a":' * 500 + "1" + "}" * 500)),
    ],
)
def test_arguments_of_calls_are_shown_as_the_json_that_they_are_or_as_their_text(arguments, shown):
    message = Message("assistant", "", (CalledTool("look", arguments),))
    text = renderer_of(THINKING).prompt([*dialogue(("user", "q")), message, ANSWER], ChatOptions())
    assert f'"arguments": {shown}}}' in text


def test_what_requests_say_goes_before_what_the_run_says_to_the_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    renderer = ChatRenderer(tokenizer, {"enable_thinking": False})
    assert renderer.prompt(dialogue(("user", "q")), ChatOptions()).endswith("</think>\n\n")
    assert renderer.prompt(dialogue(("user", "q")), ChatOptions((), {"enable_thinking": True})).endswith("assistant\n")


def test_reasoning_is_told_from_the_answer():
    assert split_reasoning("<think>\na\n</think>\n\nb", False) == ("a", "b")
    assert split_reasoning("a\n</think>\n\nb", True) == ("a", "b")
    assert split_reasoning("a, and on", True) == ("a, and on", "")
    assert split_reasoning("no tags", False) == ("", "no tags")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "places": {"type": "array"},
                    "limit": {"type": "number"},
                },
            },
        },
    }
]
HERMES_TEXTS = [
    "no call",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>',
    'First.\n<tool_call>\n{"name": "weather", "arguments": {"days": 3, "places": ["a", {"b": null}]}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "parameters": {"city": "東京"}}\n</tool_call>',
]
XML_CALL = "<tool_call>\n<function=weather>\n{}</function>\n</tool_call>"
XML_TEXTS = [
    "no call",
    "Let me see. " + XML_CALL.format("<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n"),
    XML_CALL.format("<parameter=exact>\ntrue\n</parameter>\n<parameter=limit>\n2.5\n</parameter>\n"),
    XML_CALL.format('<parameter=places>\n["a", 1]\n</parameter>\n<parameter=city>\ntwo\nlines\n</parameter>\n'),
    XML_CALL.format("<parameter=city>\nnull\n</parameter>\n") + "\n" + XML_CALL.format(""),
]
LLAMA_TEXTS = [
    "no call",
    '{"name": "weather", "parameters": {"city": "Basel"}}',
    'Well. <|python_tag|>{"name": "weather", "parameters": {"days": 1}}',
]
_SGLANG = """
import json, sys
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
asked = json.loads(sys.stdin.read())
tools = [Tool(**tool) for tool in asked["tools"]]
answers = []
for name, text in asked["texts"]:
    before, calls = FunctionCallParser(tools, name).parse_non_stream(text)
    answers.append([before, [[call.name, json.loads(call.parameters)] for call in calls]])
print(json.dumps(answers))
"""


@pytest.mark.slow
def test_calls_are_read_as_sglang_reads_them(tmp_path):
    texts = [
        *(("qwen25", text) for text in HERMES_TEXTS),
        *(("qwen3_coder", text) for text in XML_TEXTS),
        *(("llama3", text) for text in LLAMA_TEXTS),
    ]
    process = subprocess.run(
        [sys.executable, "-c", _SGLANG],
        input=json.dumps({"tools": TOOLS, "texts": texts}),
        env={**os.environ, **engine_environment("cpu", 1, tmp_path, os.environ)},
        capture_output=True,
        text=True,
        check=True,
    )
    for (name, text), (before, calls) in zip(texts, json.loads(process.stdout.splitlines()[-1]), strict=True):
        parsed = FORMATS[name].parse(text, TOOLS)
        assert not parsed.problem
        assert [[call.name, json.loads(call.arguments)] for call in parsed.tool_calls] == calls, text
        assert parsed.content.strip() == before.strip(), text


def test_a_template_names_the_format():
    assert format_of("{% if tools %}<tool_call>{% endif %}") is FORMATS["qwen25"]
    assert format_of("{% if tools %}<tool_call><function=x>{% endif %}") is FORMATS["qwen3_coder"]
    assert format_of("{{ messages }}") is None and format_of("{{ tools }} in prose") is None


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({}, "3", "3"),
        (True, "3", "3"),
        ({"type": "integer"}, "3", 3),
        ({"type": ["null", "integer"]}, "3", 3),
        ({"type": ["string", "null"]}, "3", "3"),
        ({"type": ["null"]}, "3", "3"),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, "3", 3),
        ({"oneOf": [{"enum": [1]}, {"type": "boolean"}]}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "integer"}, "NULL", None),
        ({"type": "array"}, "[1, 'a']", [1, "a"]),
        ({"type": "object"}, "no object", "no object"),
    ],
)
def test_a_parameter_is_of_the_type_that_its_schema_names(schema, text, value):
    parameters = {"type": "object", "properties": {"city": schema}}
    others = {"name": "other", "parameters": {"properties": {"city": {"type": "array"}}}}
    tools = [{"type": "function", "function": one} for one in (others, {"name": "weather", "parameters": parameters})]
    (call,) = (
        FORMATS["qwen3_coder"].parse(XML_CALL.format(f"<parameter=city>\n{text}\n</parameter>\n"), tools).tool_calls
    )
    assert json.loads(call.arguments) == {"city": value}
    assert type(json.loads(call.arguments)["city"]) is type(value)


def test_what_stands_around_calls_is_the_answer():
    json_call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    for name, text in (("qwen25", f"Well. {json_call}, said."), ("qwen3_coder", "Well. " + XML_CALL.format(""))):
        parsed = FORMATS[name].parse(text, TOOLS)
        assert parsed.content.strip() == "Well." and [call.name for call in parsed.tool_calls] == ["weather"]
    two = '<|python_tag|>{"name": "weather", "parameters": {}}; ;{"name": "weather", "parameters": {"days": 1}}'
    assert [call.arguments for call in FORMATS["llama3"].parse(two, TOOLS).tool_calls] == ["{}", '{"days": 1}']


DEEP = '{"a":' * 500 + "1" + "}" * 500


def test_a_parameter_that_cannot_be_handed_on_as_its_type_stays_text():
    text = XML_CALL.format(f"<parameter=places>\n{DEEP}\n</parameter>\n<parameter=limit>\n1e999\n</parameter>\n")
    (call,) = FORMATS["qwen3_coder"].parse(text, TOOLS).tool_calls
    assert json.loads(call.arguments) == {"places": DEEP, "limit": "1e999"}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("qwen25", "<tool_call>\n{}", "is not closed"),
        ("qwen25", "<tool_call>\n{]\n</tool_call>", "is no JSON"),
        ("qwen25", "<tool_call>\n[]\n</tool_call>", 'no object with "name"'),
        ("qwen25", '<tool_call>\n{"name": "weather", "arguments": "x"}\n</tool_call>', "are no JSON"),
        ("qwen25", '<tool_call>\n{"name": "other"}\n</tool_call>', "no tool has the name 'other'"),
        ("qwen25", "<tool_call>" + "[" * 10_000 + "</tool_call>", "is no JSON"),
        ("qwen3_coder", "<tool_call>weather</tool_call>", "has no <function=...>"),
        ("qwen25", '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>', "Out of range"),
        ("qwen25", '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>', "surrogates"),
        ("qwen25", '<tool_call>{"name": "weather", "arguments": {"limit": 1e999}}</tool_call>', "Out of range"),
        (
            "qwen25",
            '<tool_call>{"name": "weather", "arguments": ' + DEEP + "}</tool_call>",
            "nested more than 200 deep",
        ),
        ("qwen25", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', "are no JSON object"),
        ("llama3", '{"name": "weather", ', "is no JSON"),
    ],
)
def test_a_call_that_cannot_be_read_stays_text(name, text, problem):
    parsed = FORMATS[name].parse(text, TOOLS)
    assert problem in parsed.problem and parsed.content == text and not parsed.tool_calls


def test_what_tells_calls_apart_does_not_end_one_that_holds_it():
    """A command of a shell, for instance."""
    one, other = ('{"name": "weather", "parameters": {"city": "cd x; ls"}}', '{"name": "weather", "parameters": {}}')
    for text, arguments in ((one, ["cd x; ls"]), (f"<|python_tag|>{other} ; {one};", [None, "cd x; ls"])):
        calls = FORMATS["llama3"].parse(text, TOOLS).tool_calls
        assert [json.loads(call.arguments).get("city") for call in calls] == arguments
    assert FORMATS["llama3"].parse(f"{one} and so on", TOOLS).content == f"{one} and so on"


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_a_developer_speaks_as_the_system_does_in_parts_of_any_name(kind):
    told = message_of({"role": "developer", "content": [{"type": kind, "text": "Be brief."}]}, 0)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in renderer_of(THINKING).prompt([told], ChatOptions())
