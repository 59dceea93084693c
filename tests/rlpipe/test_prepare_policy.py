"""Tiny policies made from a seed."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlpipe.config.load import load_config
from rlpipe.config.model import TinyPolicyConfig
from rlpipe.model.model_reader import trainable_model
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


def test_a_policy_has_the_sizes_that_are_asked_for(tmp_path):
    sizes = {"hidden_size": 48, "layers": 5, "heads": 6, "key_value_heads": 3, "head_dim": 8}
    experts = {"experts": 5, "experts_per_token": 3, "expert_intermediate_size": 24}
    make_tiny_policy(TinyPolicyConfig(**sizes, intermediate_size=40), tmp_path / "dense", 0)
    make_tiny_policy(
        TinyPolicyConfig(architecture="qwen3_5_moe", prediction_layer=True, **sizes | experts), tmp_path / "experts", 0
    )
    dense, model = trainable_model(tmp_path / "dense"), trainable_model(tmp_path / "experts")
    for one in (dense, model):
        found = (one.hidden_size, one.layers, one.heads, one.kv_heads, one.head_dim)
        assert found == (48, 5, 6, 3, 8)
    assert (dense.mlp_width, dense.mtp_layers, model.mtp_layers) == (40, 0, 1)
    assert model.experts is not None
    assert (model.experts.experts, model.experts.top_k, model.experts.width) == (5, 3, 24)


def test_an_environment_makes_as_many_tasks_as_are_wanted_where_they_are_wanted(tmp_path):
    demo = Path(__file__).parents[2] / "configs/demo/grid.yaml"
    places = [f"model.path={tmp_path}/policy", f"prepare.directory={tmp_path}/task"]
    config = load_config(demo, [*places, "prepare.tasks={train: 7, test: 3}"])
    assert prepare(config) == [tmp_path / "policy", tmp_path / "task"]
    rows = {name: (tmp_path / f"task/{name}.jsonl").read_text().splitlines() for name in ("train", "test")}
    assert {name: len(set(lines)) for name, lines in rows.items()} == {"train": 7, "test": 3}


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
