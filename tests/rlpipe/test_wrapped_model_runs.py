"""A vision-language checkpoint as published, without its image processor, trained on text through an engine."""

import json
import sys
from pathlib import Path

import pytest
import torch
from run_support import metric_rows, run_arguments, run_command

from rlpipe.config.model import TinyPolicyConfig
from rlpipe.prepare.tiny_policy import make_tiny_policy
from rlpipe.prepare.tokenizer import byte_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "actor"))
from model_support import add_mtp, read_tensors, wrap_in_vision_language


@pytest.fixture
def published(tmp_path):
    """Text weights below `model.language_model.`, a vision tower, `mtp.*`, a tokenizer, and no image processor."""
    shape = TinyPolicyConfig(architecture="qwen3_5_moe", hidden_size=64, experts=4)
    make_tiny_policy(shape, tmp_path / "plain", seed=3)
    folder = wrap_in_vision_language(add_mtp(tmp_path / "plain", tmp_path / "mtp"), tmp_path / "published")
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_wrapped_checkpoint_is_trained_on_text_exported_whole_and_served(published, tmp_path):
    tiny = ["prepare.policy=null", "warm_start=null", "run.iterations=2", "eval.interval_iterations=2"]
    tiny += ["rollout.max_response_tokens=12", "actor.optimizer.learning_rate=0.01", "actor.optimizer.warmup_steps=0"]
    tiny += ["actor.train_mtp=true", "algorithm.routing_replay=true"]
    arguments = [*run_arguments(tmp_path, *tiny, config="configs/demo/hybrid.yaml"), f"model.path={published}"]
    run_command("train", *arguments)
    rows = metric_rows(tmp_path / "small")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert all(row["mismatch/logprob_abs_mean"] < 1e-4 for row in rows[1:])

    run_command("export", f"{tmp_path}/small", f"{tmp_path}/exported")
    before, after = read_tensors(published), read_tensors(tmp_path / "exported")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(name.startswith("mtp.") for name in moved)
    assert any(name.startswith("model.language_model.layers.0.") for name in moved)
    assert not any(name.startswith("model.visual.") for name in moved)

    # An engine that loads the exported folder answers as those that the run sent its weights to.
    output = run_command("eval", *arguments, f"model.path={tmp_path}/exported")
    printed, _ = json.JSONDecoder().raw_decode(output[output.rindex("{") :])
    assert printed == {name: value for name, value in rows[2].items() if name.startswith("eval/")}
