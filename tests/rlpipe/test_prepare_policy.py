"""Tiny policies made from a seed."""

import pytest
from safetensors.torch import load_file

from rlpipe.config.model import TinyPolicyConfig
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
