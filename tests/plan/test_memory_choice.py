"""What a run chooses by memory at its start, and keeps when it is resumed."""

import json
from pathlib import Path

import pytest

from rlpipe.config.load import validate
from rlpipe.config.root import Config
from rlpipe.config.save import resolved_yaml
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.errors import ConfigError
from rlpipe.training import memory_choice
from rlpipe.training.memory_choice import with_memory_choices

POLICY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}


def _config(folder: Path, actor: dict) -> Config:
    (folder / "policy").mkdir(exist_ok=True)
    (folder / "policy" / "config.json").write_text(json.dumps(POLICY))
    tree = {
        "run": {"name": "r", "iterations": 1, "directory": str(folder)},
        "model": {"path": str(folder / "policy")},
        "data": {"train": [{"name": "t", "path": "t.jsonl"}], "max_prompt_tokens": 64},
        "rollout": {"max_response_tokens": 192},
        "actor": {"dtype": "float32"} | actor,
    }
    return validate(tree, "test")


AUTO = {"recompute": {"granularity": "auto"}, "max_tokens_per_gpu": "auto"}


def test_the_choice_holds_whole_sequences_and_is_saved(tmp_path):
    config, notes = with_memory_choices(_config(tmp_path, AUTO))
    assert config.actor.recompute.granularity == "none"
    assert config.actor.pack_tokens % 256 == 0
    assert notes and f"{config.actor.pack_tokens:,} tokens" in notes[0]
    assert with_memory_choices(_config(tmp_path, AUTO)) == (config, notes)
    assert with_memory_choices(config) == (config, ())


def test_a_resumed_run_keeps_its_choice_on_another_machine(tmp_path, monkeypatch):
    began, _ = with_memory_choices(_config(tmp_path, AUTO | {"max_tokens_per_gpu": 512}))
    saved = RunDirectory.of(began)
    saved.path.mkdir()
    saved.config.write_text(resolved_yaml(began))
    here = memory_choice.present_cluster()
    tiny = here.model_copy(update={"node": here.node.model_copy(update={"memory_gigabytes": 0.5})})
    monkeypatch.setattr(memory_choice, "present_cluster", lambda: tiny)
    anew, notes = with_memory_choices(_config(tmp_path, AUTO))
    assert anew.actor.recompute.granularity == "full"
    assert any("does not fit: host memory" in note for note in notes)
    resumed, notes = with_memory_choices(_config(tmp_path, AUTO), resume=True)
    assert resumed == began and "as the run began" in notes[0]
    given = {"recompute": {"granularity": "full"}, "max_tokens_per_gpu": "auto"}
    resumed, _ = with_memory_choices(_config(tmp_path, given), resume=True)
    assert (resumed.actor.recompute.granularity, resumed.actor.pack_tokens) == ("full", 512)


def test_a_choice_that_was_not_made_is_an_error_and_not_a_number(tmp_path):
    actor = _config(tmp_path, AUTO).actor
    with pytest.raises(ConfigError, match="actor.max_tokens_per_gpu is 'auto'"):
        _ = actor.pack_tokens
    with pytest.raises(ConfigError, match="actor.recompute.granularity is 'auto'"):
        _ = actor.recompute.chosen
