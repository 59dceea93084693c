"""Data sets: formats, slices, templates, bad rows by place, resumable order."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from read_rows import load_rows

from rlpipe.config.data import DatasetConfig
from rlpipe.config.model import ArithmeticTaskConfig
from rlpipe.data import PromptStream, load_prompts
from rlpipe.data.prompts import fill_from_row, load_tokenizer
from rlpipe.data.stream import StreamState
from rlpipe.prepare.arithmetic import arithmetic_rows, solution, split_problems, write_rows
from rlpipe.prepare.tokenizer import byte_tokenizer
from rlpipe.shared.errors import ConfigError, DataError, ModelError

_ROWS = [{"prompt": f"question {i}", "label": str(i), "extra": i} for i in range(6)]
_GSM8K = Path(__file__).parents[1] / "gsm8k_rows"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def _write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def _dataset(path: Path, **options) -> DatasetConfig:
    return DatasetConfig(name="d", path=str(path), **options)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder", "folder with splits"])
def test_every_format_gives_the_same_rows(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        _write_lines(path, _ROWS)
    elif kind == "json":
        path.write_text(json.dumps(_ROWS))
    elif kind == "parquet":
        Dataset.from_list(_ROWS).to_parquet(path)
    else:
        path = tmp_path
        _write_lines(path / ("train.jsonl" if "splits" in kind else "a.jsonl"), _ROWS[:4])
        _write_lines(path / ("train2.jsonl" if "splits" in kind else "b.jsonl"), _ROWS[4:])
        if "splits" in kind:
            _write_lines(path / "test.jsonl", _ROWS)
    rows = load_rows(_dataset(path), skip_bad_rows=False)
    assert [dict(row.values) for row in rows.rows] == _ROWS


def test_slices_cut_rows(tmp_path):
    path = _write_lines(tmp_path / "d.jsonl", _ROWS)
    rows = load_rows(_dataset(path, rows="1:3"), skip_bad_rows=False)
    assert [row.values["label"] for row in rows.rows] == ["1", "2"]


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ("{broken\n", r"d.jsonl:3: not valid JSON"),
        ("[1]\n", r"d.jsonl:3: a JSON object is needed, but this is list"),
        ('{"prompt": "x"}\n', r"d.jsonl:3: column 'label' .* is missing; set its label_column to one .*\['prompt'\]"),
        ('{"prompt": "x", "label": null}\n', r"d.jsonl:3: column 'label'"),
    ],
)
def test_a_bad_row_is_named_or_counted(tmp_path, bad, expected):
    path = _write_lines(tmp_path / "d.jsonl", [*_ROWS[:2], bad, *_ROWS[2:]])
    with pytest.raises(DataError, match=expected):
        load_rows(_dataset(path), skip_bad_rows=False)
    rows = load_rows(_dataset(path), skip_bad_rows=True)
    assert (len(rows.rows), rows.skipped) == (6, 1)


def test_missing_and_unknown_files_are_named(tmp_path):
    with pytest.raises(DataError, match="nothing.jsonl: no such file"):
        load_rows(_dataset(tmp_path / "nothing.jsonl"), skip_bad_rows=False)
    (tmp_path / "x.csv").write_text("a,b\n")
    with pytest.raises(DataError, match="files of type .csv are not read"):
        load_rows(_dataset(tmp_path / "x.csv"), skip_bad_rows=False)
    (tmp_path / "x.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="not a readable parquet file"):
        load_rows(_dataset(tmp_path / "x.parquet"), skip_bad_rows=False)


def test_prompts_are_rendered_and_long_ones_counted(tmp_path, tokenizer):
    rows = [{"prompt": [{"role": "user", "content": "2+3=?"}], "label": 5}, {"prompt": "x" * 500, "label": "y"}]
    path = _write_lines(tmp_path / "d.jsonl", rows)
    prompts = load_prompts([_dataset(path)], tokenizer, max_prompt_tokens=100, skip_bad_rows=False)
    (prompt,) = prompts.prompts
    assert prompts.rows.too_long == 1
    assert prompt.text == "<|im_start|>user\n2+3=?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert (prompt.label, prompt.prompt_id) == ("5", "d/0")
    with pytest.raises(DataError, match="longer than data.max_prompt_tokens = 5"):
        load_prompts([_dataset(path)], tokenizer, max_prompt_tokens=5, skip_bad_rows=False)


def test_a_prompt_of_just_the_most_tokens_stays(tmp_path, tokenizer):
    path = _write_lines(tmp_path / "d.jsonl", [{"prompt": "x" * count, "label": "1"} for count in (9, 10, 11)])
    dataset = _dataset(path, apply_chat_template=False)
    lengths = {len(tokenizer.encode("x" * count)): count for count in (9, 10, 11)}
    assert len(lengths) == 3
    prompts = load_prompts([dataset], tokenizer, sorted(lengths)[1], False)
    assert ([len(one.token_ids) for one in prompts.prompts], prompts.rows.too_long) == (sorted(lengths)[:2], 1)


@pytest.mark.parametrize(("label", "text"), [(3.5, "3.5"), (-2, "-2"), ("1/3", "1/3")])
def test_a_label_is_text_or_a_number(tmp_path, tokenizer, label, text):
    path = _write_lines(tmp_path / "d.jsonl", [{"prompt": "a", "label": label}])
    (prompt,) = load_prompts([_dataset(path)], tokenizer, 100, False).prompts
    assert prompt.label == text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_label_of_a_table_is_finite(tmp_path, value):
    """JSON has no such numbers; Parquet has."""
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "label": [value]}), path)
    with pytest.raises(DataError, match=rf"is {value}, not a finite number"):
        load_rows(_dataset(path), skip_bad_rows=False)


@pytest.mark.parametrize(("value", "kind"), [(True, "bool"), (None, "null"), ([1], "list")])
def test_templates_take_text_and_numbers_alone(tmp_path, tokenizer, value, kind):
    path = _write_lines(tmp_path / "d.jsonl", [{"prompt": "a", "label": "1", "extra": value, "half": 0.5}])
    (prompt,) = load_prompts([_dataset(path)], tokenizer, 100, False).prompts
    assert fill_from_row("{half} of {label}", prompt) == "0.5 of 1"
    with pytest.raises(DataError, match=f"a column holds {kind}, not text or a number"):
        fill_from_row("{extra}", prompt)


def test_a_row_without_the_column_is_told_with_those_it_has(tmp_path):
    path = _write_lines(tmp_path / "d.jsonl", [{"question": "a", "\x1b[2J": "b", "label": "1"}])
    with pytest.raises(DataError) as error:
        load_rows(_dataset(path), skip_bad_rows=False)
    shown = ascii("\x1b[2J")  # written, not obeyed by a terminal
    assert f"one of the columns [{shown}, 'label', 'question'];" in str(error.value)


def test_templates_take_columns(tmp_path, tokenizer):
    path = _write_lines(tmp_path / "d.jsonl", _ROWS[:1])
    dataset = _dataset(path, prompt_template="Q: {prompt}", apply_chat_template=False)
    (prompt,) = load_prompts([dataset], tokenizer, 100, False).prompts
    assert prompt.text == "Q: question 0"
    assert fill_from_row("{extra} then {label}", prompt) == "0 then 0"
    with pytest.raises(DataError, match="cannot be filled"):
        fill_from_row("{nothing}", prompt)


def test_a_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelError, match="no tokenizer in this model folder"):
        load_tokenizer(str(tmp_path))


_LOADED = """
import json, sys, torch
from rlpipe.data.auto_tokenizer import auto_tokenizer

tokenizer = auto_tokenizer().from_pretrained(sys.argv[1])
needless = [name for name in ("torch._dynamo", "accelerate", "transformers.generation.utils") if name in sys.modules]
from transformers.models.auto import auto_factory

class FromTheHub(torch.nn.Module):
    def generate(self): ...

mixed = auto_factory.add_generation_mixin_to_remote_model(FromTheHub)
from transformers import AutoModelForCausalLM, GenerationMixin, Qwen3Config

model = AutoModelForCausalLM.from_config(Qwen3Config(num_hidden_layers=1, hidden_size=8, vocab_size=8))
print(json.dumps([needless, tokenizer("one two").input_ids, issubclass(mixed, GenerationMixin), type(model).__name__]))
"""


@pytest.mark.slow
def test_a_tokenizer_brings_nothing_of_models_which_can_be_loaded_all_the_same(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    command = [sys.executable, "-c", _LOADED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], tokenizer("one two").input_ids, True, "Qwen3ForCausalLM"]


def test_the_stream_takes_every_prompt_once_an_epoch_and_resumes(tmp_path, tokenizer):
    path = _write_lines(tmp_path / "d.jsonl", _ROWS)
    prompts = load_prompts([_dataset(path)], tokenizer, 100, False).prompts
    stream = PromptStream(prompts, seed=1, shuffle=True)
    first = stream.take(4)
    state = stream.state
    rest = stream.take(8)
    assert sorted(p.prompt_id for p in [*first, *rest[:2]]) == sorted(p.prompt_id for p in prompts)
    assert sorted(p.prompt_id for p in rest[2:]) == sorted(p.prompt_id for p in prompts)
    assert [*first, *rest[:2]] != rest[2:]
    resumed = PromptStream(prompts, seed=1, shuffle=True, state=StreamState(state.epoch, state.position))
    assert resumed.take(8) == rest
    assert PromptStream(prompts, seed=2, shuffle=True).take(4) != first


@given(counts=st.lists(st.integers(0, 13), max_size=12), size=st.integers(1, 7), shuffle=st.booleans())
def test_how_many_are_taken_at_a_time_does_not_change_the_stream(counts, size, shuffle):
    stream = PromptStream(range(size), 1, shuffle)
    taken = [item for count in counts for item in stream.take(count)]
    assert taken == PromptStream(range(size), 1, shuffle).take(sum(counts))
    assert stream.number == len(taken)
    assert taken == [stream.item(number) for number in range(len(taken))]


def test_arithmetic_splits_share_no_problem_in_any_order(tmp_path):
    task = ArithmeticTaskConfig(digits=1, operands=3, train_problems=150, test_problems=60)
    train, test = split_problems(task, seed=0)
    assert len(set(train)) == 150
    assert len(set(test)) == 60
    assert not {tuple(sorted(p)) for p in train} & {tuple(sorted(p)) for p in test}
    assert split_problems(task, seed=0) == (train, test)
    assert split_problems(task, seed=1) != (train, test)
    write_rows(tmp_path, *arithmetic_rows(task, seed=0))
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    assert [row["prompt"][0]["content"] for row in rows] == ["+".join(map(str, p)) + "=?" for p in test]
    assert [row["label"] for row in rows] == [str(sum(p)) for p in test]
    with pytest.raises(ConfigError, match="only 220"):
        split_problems(ArithmeticTaskConfig(digits=1, operands=3, train_problems=221, test_problems=1), seed=0)


def test_solutions_add_columns_with_carry():
    assert solution((37, 48)) == "7+8=15,3+4+1=8 Answer: 85"
    assert solution((5, 99)) == "5+9=14,0+9+1=10 Answer: 104"


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_folder_of_gsm8k_is_read_split_by_split(tokenizer, split):
    dataset = DatasetConfig(
        name="gsm8k", path=str(_GSM8K), split=split, prompt_column="question", label_column="answer"
    )
    prompts = load_prompts([dataset], tokenizer, max_prompt_tokens=1000, skip_bad_rows=False)
    rows = [json.loads(line) for line in (_GSM8K / f"{split}.jsonl").read_text().splitlines()]
    assert prompts.rows.too_long == 0
    assert [prompt.label for prompt in prompts.prompts] == [row["answer"] for row in rows]
    assert all(row["question"] in prompt.text for prompt, row in zip(prompts.prompts, rows, strict=True))


def test_rows_in_the_format_of_gsm8k_are_those_that_are_generated():
    from gsm8k_rows.make_rows import ROWS, make_rows

    assert sum(ROWS.values()) == 20
    assert {split: (_GSM8K / f"{split}.jsonl").read_text() for split in ROWS} == {s: make_rows(s) for s in ROWS}


def test_a_prompt_that_ends_in_an_answer_is_refused(tmp_path, tokenizer):
    """Whole conversations, of which the last message tells what the policy is to find."""
    asked = {"role": "user", "content": "3 + 4?"}
    earlier = [asked, {"role": "assistant", "content": "Of what?"}, asked]
    rows = [{"prompt": earlier, "label": "7"}, {"prompt": [asked, {"role": "assistant", "content": "7"}], "label": "7"}]
    dataset = _dataset(_write_lines(tmp_path / "rows.jsonl", rows))
    with pytest.raises(DataError, match=r"rows.jsonl:2: the last message of the prompt is the assistant's"):
        load_prompts([dataset], tokenizer, 200, skip_bad_rows=False)
    assert len(load_prompts([dataset], tokenizer, 200, skip_bad_rows=True).prompts) == 1


def test_prompts_with_other_answers_are_other_data(tmp_path, tokenizer):
    rows = [{"prompt": "3 + 4?", "label": label} for label in ("7", "8")]
    found = [
        load_prompts([_dataset(_write_lines(tmp_path / f"{row['label']}.jsonl", [row]))], tokenizer, 200, False)
        for row in rows
    ]
    assert found[0].prompts[0].token_ids == found[1].prompts[0].token_ids
    assert found[0].fingerprint != found[1].fingerprint
