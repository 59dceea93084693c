"""What a run trains: adapters by name, their number, and the FLOPs that are left."""

import json
from pathlib import Path
from typing import Any

import pytest

from actor.hf.adapter_table import adaptable_weights, adapter_table, peft_targets
from rlpipe.config.load import load_config
from rlpipe.config.lora import LoraConfig
from rlpipe.flops import model_flops
from rlpipe.model.model_reader import trainable_model
from rlpipe.shared.errors import ActorError, ConfigError
from rlpipe.training.trained_share import planned_model, trained_notes, untrained_work

QWEN3 = "configs/models/Qwen3-8B"
MOE = "configs/models/Qwen3-30B-A3B"
HYBRID = "configs/models/Qwen3.5-35B-A3B"


def _table(path: str, **settings: Any):
    model = trainable_model(path)
    return adapter_table(model, LoraConfig(**{"rank": 16} | settings), padded_vocab_size=model.vocab_size)


def _config(path: str, *settings: str):
    return load_config(Path("configs/demo/arithmetic.yaml"), [f"model.path={path}", "prepare.policy=null", *settings])


def _names(table: list[Any]) -> set[str]:
    return {source.name for one in table for source in one.a.sources}


def test_each_tensor_of_a_fused_weight_is_a_target_of_its_own():
    names = _names(_table(QWEN3, targets=["v_proj", "layers.3.mlp.up_proj"]))
    assert len(names) == 37
    assert "base_model.model.model.layers.3.mlp.up_proj.lora_A.weight" in names
    assert all(".v_proj." in name or ".3.mlp.up_proj." in name for name in names)


def test_all_linear_is_every_projection_and_neither_embedding_nor_head():
    names = _names(_table(HYBRID, targets=["all-linear"]))
    modules = {name.rsplit(".", 3)[1] for name in names}
    assert modules == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    }
    assert not any(".experts." in name for name in names)


@pytest.mark.parametrize("experts", ["each", "shared"])
def test_the_number_of_trained_parameters_is_that_of_their_shapes(experts):
    """Qwen3-30B-A3B: 48 layers, hidden 2048, 128 experts of width 768."""
    table = _table(MOE, targets=["gate_proj", "up_proj", "down_proj"], experts=experts)
    count = 128 if experts == "each" else 1
    assert sum(one.parameters for one in table) == 48 * count * 16 * ((2048 + 2 * 768) + (768 + 2048))


@pytest.mark.parametrize(
    ("path", "settings", "sentence"),
    [
        (QWEN3, {"targets": ["q_porj"]}, "'q_porj', which no adaptable weight of Qwen3ForCausalLM is called: it has"),
        (MOE, {"targets": ["up_proj"]}, r"is called \(for routed experts set actor.lora.experts\)"),
        (MOE, {"targets": ["up_proj"], "experts": "each"}, "one of gate_proj and up_proj, which are one tensor in"),
    ],
)
def test_a_target_that_is_not_there_is_one_sentence(path, settings, sentence):
    with pytest.raises(ActorError, match=sentence):
        _table(path, **settings)


def test_targets_of_a_tied_model_leave_out_the_embedding():
    raw = json.loads(Path(QWEN3, "config.json").read_text()) | {"tie_word_embeddings": True}
    model = trainable_model(raw)
    with pytest.raises(ActorError, match="embedding and head are one weight here"):
        adapter_table(model, LoraConfig(rank=4, targets=["lm_head"]), padded_vocab_size=model.vocab_size)


def test_names_for_peft_are_short_where_they_mean_the_same():
    model = trainable_model(MOE)
    lora = LoraConfig(rank=4, targets=["q_proj", "layers.1.self_attn.o_proj", "down_proj"], experts="each")
    table = adapter_table(model, lora, padded_vocab_size=model.vocab_size)
    adaptable = [entry for entry, _ in adaptable_weights(model, lora, padded_vocab_size=model.vocab_size)]
    assert peft_targets(model, table, adaptable) == (
        ["model.layers.1.self_attn.o_proj", "q_proj"],
        ["mlp.experts.down_proj"],
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["actor.lora.rank=4", "actor.frozen_parameters=[x]"], "frozen_parameters and actor.lora"),
        (["actor.lora.rank=4", "actor.train_mtp=true"], "trains weights that actor.lora freezes"),
        (["actor.lora.rank=4", "actor.lora.dropout=0.1", "actor.lora.experts=each"], "dropout is 0.1 with experts"),
        (["actor.lora.rank=0"], "actor.lora.rank"),
    ],
)
def test_settings_that_contradict_are_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        _config(QWEN3, *settings)


def test_a_dry_run_says_what_is_trained():
    assert trained_notes(_config(QWEN3)) == ()
    (note,) = trained_notes(_config(QWEN3, "actor.lora.rank=16"))
    trained = 36 * 16 * ((4096 + 4096) * 2 + (4096 + 1024) * 2 + 3 * (4096 + 12288))
    assert f"{trained:,} parameters are trained, 8,190,735,360 are frozen" in note


def test_flops_of_adapters():
    """Of one sequence through Qwen3-8B: products of weights once and not twice in the backward pass, three products
    with each adapter, and no gradient of inputs below the lowest adapted layer."""
    shape, lengths = trainable_model(QWEN3).shape, [512, 33]
    flops = model_flops(shape, lengths, include_mtp=False)
    weights = sum(part.weights for _, part in flops.parts)
    work = untrained_work(_config(QWEN3, "actor.lora.rank=16", "actor.lora.targets=[q_proj]"))
    adapters = 6 * 36 * 16 * (4096 + 4096) * sum(lengths)
    assert work.flops(lengths) == weights - adapters

    upper = untrained_work(_config(QWEN3, "actor.lora.rank=16", "actor.lora.targets=['layers.20.self_attn.q_proj']"))
    layers = model_flops(shape, lengths, include_mtp=False).forward - shape.head_flops * sum(lengths)
    core = layers - sum(part.weights for _, part in flops.parts) + shape.head_flops * sum(lengths)
    below = 20 / 36 * (layers + core)
    adapter = 6 * 16 * (4096 + 4096) * sum(lengths)
    assert upper.flops(lengths) == pytest.approx(weights - adapter + below)
    assert upper.flops(lengths, idle=False) == weights - adapter

    of_the_embedding = untrained_work(_config(QWEN3, "actor.lora.rank=16", "actor.lora.targets=[embed_tokens]"))
    assert of_the_embedding.idle_layers == ()
    assert of_the_embedding.flops(lengths) == weights - 6 * 16 * 4096 * sum(lengths)  # its first factor is looked up


@pytest.mark.parametrize("experts", ["each", "shared"])
def test_every_chosen_expert_has_the_flops_of_its_adapter(experts):
    """Qwen3-30B-A3B: 48 layers, 8 of 128 experts a token, which come down from 768 to 2048."""
    flops = model_flops(trainable_model(MOE).shape, [33], include_mtp=False)
    adapters = ["actor.lora.rank=16", "actor.lora.targets=[down_proj]", f"actor.lora.experts={experts}"]
    saved = sum(part.weights for _, part in flops.parts) - 6 * 48 * 8 * 16 * (768 + 2048) * 33
    assert untrained_work(_config(MOE, *adapters)).flops([33], idle=False) == saved


def test_a_frozen_embedding_that_is_the_head_saves_the_product_of_the_head(tmp_path):
    raw = json.loads(Path(QWEN3, "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    work = untrained_work(_config(str(tmp_path), "actor.frozen_parameters=[embed_tokens]"))
    assert work.flops([10]) == 2 * 151936 * 4096 * 10


def test_plans_count_what_is_trained():
    model = planned_model(_config(MOE, "actor.lora.rank=8", "actor.lora.experts=shared"))
    assert model.adapters is not None
    assert model.trained < model.parameters / 1000
    assert model.trained_experts
    assert not planned_model(_config(MOE, "actor.lora.rank=8", "actor.lora.targets=[q_proj]")).trained_experts
    assert planned_model(_config(MOE)).trained == model.parameters
