"""Large data sets: mapped by processes once, memory-mapped from then on, and the very prompts of a small one."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from rlpipe.config.data import DatasetConfig
from rlpipe.config.root import Config
from rlpipe.data import PromptStream, load_prompts, mapped_rows
from rlpipe.data.mapped_rows import Preparation, map_rows
from rlpipe.data.stream import StreamState
from rlpipe.prepare.tokenizer import byte_tokenizer
from rlpipe.shared.errors import DataError
from rlpipe.supervised.examples import load_examples

_ROWS = 230


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def files_from(monkeypatch):
    """Have even these few rows mapped by processes and kept in files."""

    def set_limits() -> None:
        monkeypatch.setattr(mapped_rows, "_SMALL_ROWS", 0)
        monkeypatch.setattr(mapped_rows, "_BATCH_ROWS", 50)

    return set_limits


def _lines(folder: Path) -> Path:
    """Rows of which some are blank, bad, too long, or refused by the template."""
    lines = []
    for row in range(_ROWS):
        prompt = [{"role": "user", "content": f"question {row} é"}]
        values = {"prompt": prompt if row % 2 else f"text {row}", "label": row, "nested": {"a": [row, None]}}
        if row % 23 == 0:
            values["prompt"] = "long " * 60
        lines.append(json.dumps(values, ensure_ascii=False) + ("\r\n" if row % 5 == 0 else "\n"))
        if row % 31 == 0:
            lines += ["\n", "{broken\n"]
        if row % 37 == 0:
            lines.append(json.dumps({"prompt": "half \ud800 pair", "label": "1"}) + "\n")
    path = folder / "rows.jsonl"
    path.write_text("".join(lines).rstrip("\n"), encoding="utf-8")
    return path


def _load(path, tokenizer, preparation, skip=True, **options):
    dataset = DatasetConfig(name="d", path=str(path), **options)
    return load_prompts([dataset, dataset.model_copy(update={"rows": "3:9"})], tokenizer, 150, skip, preparation)


@pytest.mark.parametrize("rows", [None, "17:-20", ":60"])
def test_many_processes_and_files_give_what_one_process_gives(tmp_path, tokenizer, files_from, rows):
    path, preparation = _lines(tmp_path), Preparation(str(tmp_path / "cache"), processes=2)
    small = _load(path, tokenizer, preparation, rows=rows)
    assert not (tmp_path / "cache").exists()
    files_from()
    first, second = (_load(path, tokenizer, preparation, rows=rows) for _ in range(2))
    assert len(list((tmp_path / "cache").iterdir())) == 2
    for large in (first, second):
        assert list(large.prompts) == list(small.prompts)
        assert large.rows == small.rows
        assert np.array_equal(large.prompts.digests, small.prompts.digests)
    assert small.rows.too_long and small.rows.skipped and len(small.prompts) > 30
    order = [PromptStream(prompts, 3, True, StreamState(1, 7)).take(40) for prompts in (small.prompts, second.prompts)]
    assert order[0] == order[1]


def test_the_first_bad_row_is_named_from_files_too(tmp_path, tokenizer, files_from):
    path, preparation = _lines(tmp_path), Preparation(str(tmp_path / "cache"))
    files_from()
    for _ in range(2):
        with pytest.raises(DataError, match=r"rows.jsonl:3: not valid JSON"):
            _load(path, tokenizer, preparation, skip=False)


def test_what_changes_the_prompts_makes_them_anew(tmp_path, tokenizer, files_from):
    path, cache = _lines(tmp_path), tmp_path / "cache"
    files_from()

    def made() -> int:
        _load(path, tokenizer, Preparation(str(cache)))
        return len(list(cache.iterdir()))

    assert (made(), made()) == (2, 2)
    with path.open("a") as file:
        file.write("\n" + json.dumps({"prompt": "one more", "label": "1"}))
    assert made() == 4
    tokenizer = byte_tokenizer()
    tokenizer.chat_template += " "
    assert made() == 6
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


def test_an_encoder_whose_code_is_changed_makes_them_anew(tmp_path, tokenizer, files_from, monkeypatch):
    path, preparation = _lines(tmp_path), Preparation(str(tmp_path / "cache"), processes=1)
    files_from()
    monkeypatch.syspath_prepend(tmp_path)
    made = []
    for remark in ("# as it was", "# as it was", "# as it is"):
        body = f"class Encoder(PromptEncoder):\n    pass {remark}\n"
        source = f"from rlpipe.data.prompts import PromptEncoder\n\n\n{body}"
        (tmp_path / "encoder_of_mine.py").write_text(source)
        encoder = importlib.import_module("encoder_of_mine").Encoder
        map_rows(encoder(DatasetConfig(name="d", path=str(path)), tokenizer, max_prompt_tokens=150), preparation)
        made.append(len(list((tmp_path / "cache").iterdir())))
    assert made == [1, 1, 2]


def test_conversations_and_answers_are_mapped_the_same_way(tmp_path, tokenizer, files_from):
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    path = tmp_path / "chat.jsonl"
    for conversations in (True, False):
        last = turns[1:] if conversations else []  # a prompt ends with what is asked
        rows = [{"prompt": [*turns, {**turns[0], "content": str(n)}, *last], "label": str(n)} for n in range(120)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = Config.model_validate(
            {
                "run": {"name": "r", "iterations": 1},
                "model": {"path": "unused"},
                "data": {"train": [{"name": "d", "path": str(path)}], "cache_directory": str(tmp_path / "cache")},
                "sft": {"conversations": conversations, "max_sequence_tokens": 400},
            }
        )
        small = load_examples(config, config.sft, tokenizer).sequences
        files_from()
        large = load_examples(config, config.sft, tokenizer).sequences
        assert len(small) == len(large) == 120
        for one, other in zip(small, large, strict=True):
            assert one.sequence_id == other.sequence_id
            assert np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.loss_mask, other.loss_mask)


def test_a_streamed_data_set_gives_its_first_rows(tmp_path, tokenizer):
    rows = [{"prompt": f"question {row}", "label": str(row)} for row in range(50)]
    (tmp_path / "set").mkdir()
    Dataset.from_list(rows).to_parquet(tmp_path / "set" / "train-00000.parquet")
    dataset = DatasetConfig(name="d", path=str(tmp_path / "set"), streaming=True, rows="10:20")
    prompts = load_prompts([dataset], tokenizer, 150, False).prompts
    assert [prompt.label for prompt in prompts] == [str(row) for row in range(10, 20)]
    with pytest.raises(ValueError, match="a streamed data set has no end"):
        DatasetConfig(name="d", path="owner/set", streaming=True)


def test_a_data_set_of_several_subsets_tells_them(tmp_path, tokenizer):
    subsets = "".join(f"- {{config_name: {name}, data_files: {name}.jsonl}}\n" for name in ("main", "socratic"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{subsets}---\n")
    for name in ("main", "socratic"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name, "label": "1"}) + "\n")
    dataset = DatasetConfig(name="d", path=str(tmp_path), streaming=True, rows="0:1")
    with pytest.raises(DataError, match=r"set `subset` to one of \['main', 'socratic'\]"):
        load_prompts([dataset], tokenizer, 150, False)
    named = dataset.model_copy(update={"subset": "socratic"})
    assert "socratic" in load_prompts([named], tokenizer, 150, False).prompts[0].text


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path, tokenizer, files_from):
    (tmp_path / "file").write_text("")
    files_from()
    with pytest.raises(DataError, match="set data.cache_directory"):
        _load(_lines(tmp_path), tokenizer, Preparation(str(tmp_path / "file")))


def test_another_limit_or_argument_of_the_template_makes_them_anew(tmp_path, files_from):
    path, preparation, tokenizer = _lines(tmp_path), Preparation(str(tmp_path / "cache")), byte_tokenizer()
    tokenizer.chat_template += "{{ mark | default('') }}"
    dataset = DatasetConfig(name="d", path=str(path))
    files_from()
    for mark, most in (("x", 600), ("x", 150), ("y", 150)):
        found = load_prompts([dataset], tokenizer, most, True, preparation, template_arguments={"mark": mark})
        assert max(len(prompt.token_ids) for prompt in found.prompts) > 150 or most == 150
        assert all(len(prompt.token_ids) <= most and prompt.text.endswith(mark) for prompt in found.prompts)


def test_a_file_that_is_corrected_in_place_is_read_anew(tmp_path, tokenizer, files_from):
    path, preparation = _lines(tmp_path), Preparation(str(tmp_path / "cache"))
    files_from()
    before = [prompt.label for prompt in _load(path, tokenizer, preparation).prompts]
    path.write_bytes(path.read_bytes().replace(b'"label": 7,', b'"label": 8,'))
    after = [prompt.label for prompt in _load(path, tokenizer, preparation).prompts]
    assert before.count("7") and after == ["8" if label == "7" else label for label in before]
