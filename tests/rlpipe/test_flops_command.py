import json

import pytest

from rlpipe.commands.flops import parse_seqlens, run_flops
from rlpipe.shared.errors import ConfigError, ModelError


def test_json_has_integers_that_add_up():
    values = json.loads(run_flops("Qwen3.5-35B-A3B", [1024, 512, 2048, 300, 212], as_json=True))
    assert values["train"] == 75_339_375_575_040
    assert values["forward"] * 3 == values["train"]
    assert values["convention"] == "causal_half"
    assert set(values["per_layer_type"]) == {"full_attention", "gdn", "moe", "head"}
    assert sum(values["per_layer_type"].values()) == values["forward"]
    assert all(type(flops) is int for flops in values["per_layer_type"].values())


def test_convention_is_an_option():
    values = json.loads(run_flops("Qwen3-8B", [4096], convention="full", as_json=True))
    assert (values["train"], values["convention"]) == (52_656_340_992 * 4096, "full")


def test_text_names_parts_totals_and_convention():
    text = run_flops("Qwen3-8B", [4096], convention="causal_exact")
    assert "convention causal_exact" in text
    for name in ("full_attention", "dense", "head", "forward", "training", "200,840,589,606,912"):
        assert name in text


@pytest.mark.parametrize(("text", "lengths"), [("1024", (1024,)), ("1024, 512", (1024, 512))])
def test_lengths_from_the_command_line(text, lengths):
    assert parse_seqlens(text) == lengths


@pytest.mark.parametrize("text", ["", "1024,", "0", "-5", "4k"])
def test_wrong_lengths_are_refused(text):
    with pytest.raises(ConfigError, match="--seqlens is"):
        parse_seqlens(text)


def test_wrong_convention_model_and_empty_lengths_are_refused():
    with pytest.raises(ConfigError, match="causal_half, causal_exact, full"):
        run_flops("Qwen3-8B", [5], convention="half")
    with pytest.raises(ModelError, match="Qwen3-8B"):
        run_flops("Qwen3-9B", [5])
    with pytest.raises(ConfigError, match="no sequence lengths"):
        run_flops("Qwen3-8B", [])
