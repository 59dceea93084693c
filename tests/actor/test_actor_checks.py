"""What a model cannot do in a configured actor, and which weights are refused, all said before anything starts."""

import json

import pytest
import torch
from model_support import DENSE, GDN, GDN_MOE, MOE, TinyModel, add_mtp, read_tensors, write_checkpoint, write_tensors

from actor.hf.frozen_parameters import frozen_targets
from rlpipe.config.actor import ActorConfig
from rlpipe.model.actor_checks import check_actor, check_reference
from rlpipe.model.model_reader import trainable_model
from rlpipe.model.weight_checks import all_finite, check_finite, check_tied_head
from rlpipe.shared.errors import ActorError, ModelError

ONLY_LINEAR = TinyModel("x", "qwen3_5_text", GDN.changes | {"layer_types": ["linear_attention"] * 4})
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"} | {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


def described(model, **changes):
    raw = json.loads(model.config().to_json_string()) | {"architectures": [ARCHITECTURES[model.model_type]]}
    return trainable_model(raw | changes)


def selective(*modules):
    return ActorConfig.model_validate({"recompute": {"granularity": "selective", "modules": list(modules)}})


@pytest.mark.parametrize(
    ("model", "modules", "missing"),
    [
        (DENSE, ("core_attn", "mlp"), None),
        (DENSE, ("moe",), "'moe'"),
        (MOE, ("moe", "core_attn"), None),
        (MOE, ("mlp",), "'mlp'"),
        (MOE, ("shared_experts",), "'shared_experts'"),
        (GDN_MOE, ("shared_experts",), None),
        (
            TinyModel("x", "qwen3_5_text", GDN.changes | {"layer_types": ["linear_attention"] * 4}),
            ("core_attn",),
            "cor",
        ),
    ],
)
def test_only_what_a_model_contains_is_computed_again(model, modules, missing):
    if missing is None:
        check_actor(described(model), selective(*modules))
    else:
        with pytest.raises(ModelError, match=missing):
            check_actor(described(model), selective(*modules))


@pytest.mark.parametrize("modules", [["layernorm"], ["moe_act"], [], ["attention"]])
def test_modules_that_cannot_be_computed_again_are_refused_with_the_configuration(modules):
    with pytest.raises(ValueError, match="modules"):
        selective(*modules)


@pytest.mark.parametrize(
    ("model", "patterns", "sentence"),
    [
        (DENSE, ["q_proj"], "match all of them or none"),
        (DENSE, ["embed_tokens", "nowhere"], "'nowhere', which matches no parameter"),
        (DENSE, [r"^(?!.*experts)"], "every parameter"),
        (MOE, [r"experts[.]0[.]"], "match all of them or none"),
    ],
)
def test_patterns_that_freeze_something_else_than_meant_are_refused(model, patterns, sentence):
    with pytest.raises(ActorError, match=sentence):
        frozen_targets(described(model), ActorConfig(frozen_parameters=patterns))


def test_a_tied_head_is_frozen_with_its_embedding():
    tied = described(DENSE, tie_word_embeddings=True)
    actor = ActorConfig(frozen_parameters=["embed_tokens"])
    assert frozen_targets(tied, actor) == {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert frozen_targets(described(DENSE), actor) == {"embedding.word_embeddings.weight"}


def test_a_reference_of_other_maths_is_refused():
    check_reference(described(DENSE), described(DENSE, max_position_embeddings=64))
    with pytest.raises(ModelError, match=r"model.reference_path holds a model with rope"):
        check_reference(described(DENSE), described(DENSE, rope_parameters={"rope_type": "default", "rope_theta": 5.0}))


def test_a_stored_head_unlike_the_embedding_is_refused(tmp_path):
    path = write_checkpoint(TinyModel("tied", "qwen3", {"tie_word_embeddings": True}), tmp_path)
    model, tensors = trainable_model(path), read_tensors(path)
    check_tied_head(model, path)
    embedding = tensors["model.embed_tokens.weight"]
    check_tied_head(model, write_tensors(path, tmp_path / "same", tensors | {"lm_head.weight": embedding.clone()}))
    other = write_tensors(path, tmp_path / "other", tensors | {"lm_head.weight": embedding + 1})
    with pytest.raises(ModelError, match="lm_head.weight unlike model.embed_tokens.weight"):
        check_tied_head(model, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 6e4])
def test_one_value_is_seen_wherever_it_lies(dtype, value):
    for place in (0, 500, 998):
        tensor = torch.randn(999, generator=torch.Generator().manual_seed(0)).to(dtype)
        tensor[place] = value
        assert bool(all_finite(tensor)) is (value == 6e4)


def test_a_tensor_without_values_is_finite():
    assert all_finite(torch.zeros(3, 0)) and all_finite(torch.tensor(2.0))


def test_a_tensor_that_is_not_finite_is_named(tmp_path):
    path = add_mtp(write_checkpoint(GDN_MOE, tmp_path), tmp_path / "mtp")
    check_finite(path)
    tensors = read_tensors(path)
    tensors["model.layers.1.mlp.gate.weight"][2, 3] = torch.nan
    damaged = write_tensors(path, tmp_path / "damaged", tensors)
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.gate.weight in .* not finite"):
        check_finite(damaged)
    check_finite(damaged, ["lm_head.weight"])
