"""Conversations by the chat templates of real models: each turn is trained as the policy would be asked for it."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trl

from rlpipe.config.load import validate
from rlpipe.data.chat_messages import template_message
from rlpipe.data.chat_template import ChatShown, render_chat
from rlpipe.data.mapped_rows import Preparation
from rlpipe.data.prompts import load_prompts
from rlpipe.prepare.tokenizer import byte_tokenizer
from rlpipe.shared.errors import ConfigError, DataError
from rlpipe.supervised.examples import load_examples

_TEMPLATES = Path(trl.__file__).with_name("chat_templates")
_TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
_ASKED = {"role": "user", "content": "Where is Ödön?"}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"of": "Ödön", "n": null}'}}
_CALLED = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_FOUND = {"role": "tool", "tool_call_id": "call_1", "name": "look_up", "content": '{"place": "Győr"}'}
_PLAIN = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Yes, one."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "No, two."},
]
_THOUGHT = [
    {**one, "reasoning_content": f"I think: {one['content']}"} if i % 2 else one for i, one in enumerate(_PLAIN)
]
_WITH_TOOLS = [_ASKED, _CALLED, _FOUND, {"role": "assistant", "content": "In Győr."}, *_PLAIN[2:]]


def _tokenizer(template: str):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (_TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer


def _config(folder: Path, rows: list[dict], **data):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"name": "d", "path": str(path), "prompt_column": "messages", "tools_column": "tools"}
    tree = {
        "run": {"name": "r", "iterations": 1},
        "model": {"path": "none"},
        "data": {"train": [dataset], "max_prompt_tokens": 2000, **data},
        "sft": {"conversations": True, "max_sequence_tokens": 4000},
    }
    return validate(tree, "test")


def _examples(config, tokenizer):
    return load_examples(config, config.sft, tokenizer)


def _spans(sequence):
    """(first, end) of each run of trained predictions, as positions of the predicted tokens."""
    trained = [0, *sequence.loss_mask[:-1].tolist(), 0]
    edges = [position for position in range(1, len(trained)) if bool(trained[position]) != bool(trained[position - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


@pytest.mark.parametrize(
    ("template", "messages", "sequences"),
    [
        ("qwen2_5", _PLAIN, 1),
        ("qwen2_5", _WITH_TOOLS, 1),
        ("llama3_1", _WITH_TOOLS, 1),
        ("qwen3", _PLAIN, 2),  # the answer to an earlier question is written without its reasoning
        ("qwen3", _THOUGHT, 2),
        ("qwen3", _WITH_TOOLS, 3),  # an earlier call of a tool is, too, where it has no reasoning
        ("qwen3_5_think", _THOUGHT, 2),
        ("qwen3_5_think", _WITH_TOOLS, 2),
        ("qwen3_6", _WITH_TOOLS, 2),
        ("glm4moe", _THOUGHT, 2),
        ("gptoss", _PLAIN, 2),  # the last answer ends in another token than earlier ones
    ],
)
def test_each_turn_is_trained_once_after_what_the_policy_would_be_shown(tmp_path, template, messages, sequences):
    tokenizer = _tokenizer(template)
    row = {"messages": messages, "tools": _TOOLS if messages is _WITH_TOOLS else None}
    examples = _examples(_config(tmp_path, [row]), tokenizer)
    assert (len(examples.sequences), examples.rows.rows) == (sequences, 1)
    names = [sequence.sequence_id for sequence in examples.sequences]
    assert names == ["d/0", *(f"d/0.{part}" for part in range(1, sequences))]
    # What templates want: no null content, and arguments as an object.
    shown = [{**one, "content": one["content"] or ""} for one in messages]
    shown = [{**one, "tool_calls": [_with_object(_CALL)]} if one.get("tool_calls") else one for one in shown]
    expected = [
        (
            tokenizer.apply_chat_template(shown[:at], row["tools"], add_generation_prompt=True, tokenize=False),
            tokenizer.apply_chat_template(shown[: at + 1], row["tools"], tokenize=False),
        )
        for at, one in enumerate(messages)
        if one["role"] == "assistant"
    ]
    found = [
        (tokenizer.decode(sequence.token_ids[:first]), tokenizer.decode(sequence.token_ids[:end]))
        for sequence in examples.sequences
        for first, end in _spans(sequence)
    ]
    assert [before for before, _ in found] == [before for before, _ in expected]
    for (_, whole), (_, rendered) in zip(found, expected, strict=True):
        assert whole == rendered or (whole + "\n" == rendered and whole.endswith(tokenizer.eos_token))


def _with_object(call):
    return {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}


def test_sequences_of_a_row_are_named_counted_and_left_out_by_themselves(tmp_path):
    tokenizer = _tokenizer("qwen3")
    long = [*_PLAIN, {"role": "user", "content": "Three?"}, {"role": "assistant", "content": "long " * 1000}]
    rows = [{"messages": _PLAIN, "tools": None}, {"messages": "bad"}, {"messages": long, "tools": None}]
    config = _config(tmp_path, rows, skip_bad_rows=True)
    examples = _examples(config, tokenizer)
    assert [one.sequence_id for one in examples.sequences] == ["d/0", "d/0.1", "d/1", "d/1.1"]
    assert (examples.rows.rows, examples.rows.too_long, examples.rows.skipped) == (3, 1, 1)
    became, lost = examples.rows.notes("the data")
    assert became.startswith("the data: 3 rows become 6 sequences, because the chat template")
    assert lost.startswith("the data: of 6 sequences 1 are too long and 1 are skipped, the first of those for: ")


def test_a_large_data_set_is_split_by_several_processes_as_a_small_one_is(tmp_path, monkeypatch):
    tokenizer = _tokenizer("qwen3")
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, *_PLAIN[1:]], "tools": None} for n in range(40)]
    config = _config(tmp_path, rows, processes=2, cache_directory=str(tmp_path / "cache"))
    small = _examples(config, tokenizer)
    monkeypatch.setattr("rlpipe.data.mapped_rows._SMALL_ROWS", 1)
    monkeypatch.setattr("rlpipe.data.mapped_rows._BATCH_ROWS", 10)
    large, again = _examples(config, tokenizer), _examples(config, tokenizer)
    assert len(small.sequences) == 80
    assert small.fingerprint == large.fingerprint == again.fingerprint
    assert [one.sequence_id for one in again.sequences] == [one.sequence_id for one in small.sequences]


@pytest.mark.parametrize(
    ("template", "row", "error"),
    [
        ("qwen2_5", {"messages": _THOUGHT}, "leaves out the assistant's reasoning in message 1"),
        ("gemma3", {"messages": _PLAIN, "tools": _TOOLS}, "leaves out the tool 'look_up'"),
        ("lfm2", {"messages": _WITH_TOOLS}, "leaves out a tool call of the assistant's in message 1"),
        ("deepseek_r1_distill", {"messages": _PLAIN}, "begin message 1 after '<think>.n', but writes 'Yes, one."),
        ("qwen2_5", {"messages": _PLAIN[:1]}, "no assistant turn to train on"),
        ("qwen2_5", {"messages": _PLAIN, "tools": "[{"}, r"column 'tools' \(data set 'd', tools\) is no JSON text"),
        ("qwen2_5", {"messages": _PLAIN, "tools": [{}]}, "has tool 0 without a name"),
        ("qwen2_5", {"messages": [_ASKED, {**_CALLED, "tool_calls": [{}]}]}, r"message 1 whose tool_calls\[0\] is no"),
        ("qwen2_5", {"messages": [_ASKED, {"role": "assistant"}]}, "message 1 whose content is null"),
        ("qwen2_5", {"messages": "Where?"}, "column 'messages' is text, and sft.conversations needs messages"),
    ],
)
def test_what_a_template_would_lose_is_an_error_with_its_place(tmp_path, template, row, error):
    with pytest.raises(DataError, match=error) as raised:
        _examples(_config(tmp_path, [{"tools": None, **row}]), _tokenizer(template))
    assert "rows.jsonl:1: " in str(raised.value)


def test_rows_of_columns_and_of_other_forms_are_read_alike(tmp_path):
    """Parquet gives each message the keys of all, arguments as objects have the keys of all calls."""
    tokenizer = _tokenizer("qwen2_5")
    call = {"id": None, "type": "function", "function": {"name": "look_up", "arguments": {"of": "Ödön"}}}
    by_columns = [
        {**_ASKED, "content": [{"type": "text", "text": "Where is"}, {"type": "text", "text": "Ödön?"}]},
        {**_CALLED, "tool_calls": [call]},
        _FOUND,
        {"role": "assistant", "content": "In Győr."},
    ]
    text = [{"role": "user", "content": "Where is\nÖdön?"}, {**_CALLED, "tool_calls": [call]}, *by_columns[2:]]
    other = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "x", "arguments": {"m": 1}}}]}
    keys = {key for message in (*by_columns, other) for key in message}
    padded = [[{key: message.get(key) for key in keys} for message in one] for one in (text, [_ASKED, other])]
    pq.write_table(pa.table({"messages": padded, "tools": [json.dumps(_TOOLS), None]}), tmp_path / "rows.parquet")
    from_lines = _examples(_config(tmp_path, [{"messages": by_columns, "tools": _TOOLS}]), tokenizer).sequences
    columns = _config(tmp_path, [])
    dataset = columns.data.train[0].model_copy(update={"path": str(tmp_path / "rows.parquet")})
    columns = columns.model_copy(update={"data": columns.data.model_copy(update={"train": [dataset]})})
    from_columns = _examples(columns, tokenizer).sequences
    assert from_columns[0].token_ids.tolist() == from_lines[0].token_ids.tolist()
    assert '"arguments": {"m": 1}' in tokenizer.decode(from_columns[1].token_ids)
    names = {"user": "human", "assistant": "gpt"}
    share_gpt = [{"from": names[one["role"]], "value": one["content"]} for one in _PLAIN]
    told = [{"messages": share_gpt, "tools": None}, {"messages": _PLAIN, "tools": None}]
    first, second = _examples(_config(tmp_path, told), tokenizer).sequences
    assert first.token_ids.tolist() == second.token_ids.tolist()


def test_whole_numbers_and_special_text_of_calls_stay_what_they_are(tmp_path):
    tokenizer = _tokenizer("qwen3_5_think")
    arguments = {"of": 2**70, "text": "<|im_end|>"}
    call = {"function": {"name": "look_up", "arguments": json.dumps(arguments)}}
    row = {"messages": [_ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": _TOOLS}
    described = {**row, "tools": [{"name": "look_up", "description": "until <|im_end|>"}]}
    described["messages"] = _PLAIN[:2]
    examples = _examples(_config(tmp_path, [row, described]), tokenizer)
    sequence, _ = examples.sequences
    text = tokenizer.decode(sequence.token_ids)
    assert str(2**70) in text and "<|im_end|>\n</parameter>" in text
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert sequence.token_ids.tolist().count(ends) == text.count("<|im_end|>") - 1
    assert examples.rows.special_text == 2


def test_prompts_show_tools_and_what_the_template_is_told(tmp_path):
    tokenizer = _tokenizer("qwen3")
    row = {"messages": [_ASKED, _CALLED, _FOUND], "tools": _TOOLS, "label": "Győr"}
    for arguments, ends in (({}, "assistant\n"), ({"enable_thinking": False}, "<think>\n\n</think>\n\n")):
        config = _config(tmp_path, [row], chat_template_arguments=arguments)
        (prompt,) = load_prompts(
            config.data.train, tokenizer, 2000, False, Preparation(), False, config.data.chat_template_arguments
        ).prompts
        assert prompt.text.endswith(ends)
        assert '"name": "look_up", "parameters"' in prompt.text and '{"name": "look_up", "arguments"' in prompt.text
        assert prompt.metadata["tools"] == _TOOLS
    with pytest.raises(ConfigError, match="does not know 'enable_thinkin'"):
        load_prompts(config.data.train, tokenizer, 2000, False, template_arguments={"enable_thinkin": False})


def test_examples_are_rendered_as_the_template_is_told(tmp_path):
    tokenizer = _tokenizer("qwen3_6")
    row = {"messages": _PLAIN[:2], "tools": None}
    trained = []
    for arguments in ({}, {"enable_thinking": False}):
        (sequence,) = _examples(_config(tmp_path, [row], chat_template_arguments=arguments), tokenizer).sequences
        ((first, end),) = _spans(sequence)
        trained.append(tokenizer.decode(sequence.token_ids[first:end]))
    assert trained == ["\n</think>\n\nYes, one.<|im_end|>", "Yes, one.<|im_end|>"]
    with pytest.raises(ConfigError, match="does not know 'thinking'"):
        _examples(_config(tmp_path, [row], chat_template_arguments={"thinking": False}), tokenizer)
    with pytest.raises(ConfigError, match="'tools' is not the template's own argument"):
        _config(tmp_path, [row], chat_template_arguments={"tools": []})


def test_text_that_a_template_writes_as_json_is_not_left_out():
    text = render_chat([_ASKED, _CALL_FORM, _FOUND], _tokenizer("llama3_1"), "here", True, ChatShown(_TOOLS))
    assert "Győr" in text


_CALL_FORM = {"role": "assistant", "content": "", "tool_calls": [_with_object(_CALL)]}


def test_what_a_tool_found_is_its_message_in_the_form_of_share_gpt(tmp_path):
    forms = [
        {"from": "human", "value": "Where?"},
        {"from": "gpt", "value": "Hm."},
        {"from": "observation", "value": "7"},
    ]
    assert [template_message(one)["role"] for one in forms] == ["user", "assistant", "tool"]
