"""Tiny policies made from a seed."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlpipe.config.load import load_config
from rlpipe.config.model import TinyPolicyConfig
from rlpipe.prepare import kept_though_different, prepare
from rlpipe.prepare.tiny_policy import make_tiny_policy


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5_moe"])
def test_a_seed_makes_the_same_policy_and_no_token_has_a_zero_embedding(tmp_path, architecture):
    shape = TinyPolicyConfig(architecture=architecture)
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        make_tiny_policy(shape, tmp_path / name, seed)
    files = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again", "other")}
    assert files["first"] == files["again"] != files["other"]
    embedding = load_file(tmp_path / "first" / "model.safetensors")["model.embed_tokens.weight"]
    assert embedding.norm(dim=1).min() > 0.05


def test_what_was_made_from_other_settings_is_told_of(tmp_path):
    demo = Path(__file__).parents[2] / "configs/demo/arithmetic.yaml"
    settings = [f"model.path={tmp_path}/policy", f"prepare.directory={tmp_path}/task", "prepare.policy.layers=1"]
    settings += ["prepare.arithmetic.train_problems=8", "prepare.arithmetic.test_problems=4"]
    prepare(load_config(demo, settings))
    assert list(kept_though_different(load_config(demo, settings))) == []
    other = load_config(demo, [*settings, "prepare.policy.layers=2", "prepare.arithmetic.digits=3"])
    policy, train, test = kept_though_different(other)
    assert (
        policy == f"{tmp_path}/policy was there and is used as it is, with num_hidden_layers 1, unlike prepare.policy"
    )
    assert train.startswith(f"{tmp_path}/task/train.jsonl was there and is used as it is")
    (tmp_path / "policy" / "config.json").write_text(json.dumps({"model_type": "other"}))
    assert test.startswith(f"{tmp_path}/task/test.jsonl") and len(list(kept_though_different(other))) == 2
