"""Executed FLOPs: recomputation, kernels and padding on top of model FLOPs."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from rlpipe.flops import KernelWork, Recompute, hardware_flops, model_flops
from rlpipe.model.model_reader import describe_model
from rlpipe.shared.errors import ConfigError

LENGTHS = (4096,)
HYBRID_CONFIG = json.loads(
    (Path(__file__).parents[2] / "configs" / "models" / "Qwen3.5-35B-A3B" / "config.json").read_text()
)


@pytest.fixture(scope="module")
def hybrid():
    return describe_model("Qwen3.5-35B-A3B").shape


def _selective(*modules):
    return Recompute("selective", frozenset(modules))


def test_without_options_it_is_the_model(hybrid):
    assert hardware_flops(hybrid, LENGTHS) == model_flops(hybrid, LENGTHS).train


def test_full_recompute_leaves_out_the_head(hybrid):
    assert hardware_flops(hybrid, LENGTHS, Recompute("full")) == 99_935_835_914_240
    assert 99_935_835_914_240 / model_flops(hybrid, LENGTHS).train == pytest.approx(1.280, abs=5e-4)


def test_full_recompute_includes_mtp_layers_without_their_head():
    shape = describe_model(HYBRID_CONFIG | {"mtp_num_hidden_layers": 1}).shape
    breakdown = model_flops(shape, LENGTHS)
    again = breakdown.forward - 2 * shape.head_flops * 4096
    assert hardware_flops(shape, LENGTHS, Recompute("full")) == breakdown.train + again


def test_selective_recompute_adds_the_named_modules_only(hybrid):
    model, parts = model_flops(hybrid, LENGTHS), model_flops(hybrid, LENGTHS).per_layer_type
    core = 10 * 8192 * 4096**2
    shared = 40 * 4096 * (6 * 2048 * 512 + 2 * 2048)
    for modules, again in [
        (("core_attn",), core),
        (("moe",), parts["moe"]),
        (("shared_experts",), shared),
        (("moe", "shared_experts"), parts["moe"]),
        (("moe_act", "layernorm"), 0),
        (("mlp", "mla_up_proj"), 0),
        (("core_attn", "shared_experts"), core + shared),
    ]:
        assert hardware_flops(hybrid, LENGTHS, _selective(*modules)) == model.train + again, modules


def test_selective_recompute_of_a_dense_model():
    shape = describe_model("Qwen3-8B").shape
    model = model_flops(shape, LENGTHS)
    assert hardware_flops(shape, LENGTHS, _selective("mlp")) == model.train + model.per_layer_type["dense"]


def test_latents_are_projected_up_again_by_hand():
    shape = describe_model(AutoConfig.for_model("deepseek_v3", num_hidden_layers=2).to_dict()).shape
    queries, keys_and_values = 1536 * 128 * (128 + 64), 512 * 128 * (128 + 128)
    again = 2 * 4096 * 2 * (queries + keys_and_values)
    assert hardware_flops(shape, LENGTHS, _selective("mla_up_proj")) == model_flops(shape, LENGTHS).train + again


def test_unknown_module_is_refused():
    with pytest.raises(ConfigError, match=r"\['attention'\] are unknown"):
        _selective("attention")


def test_flash_attention_makes_its_scores_again():
    """Five products in the backward pass instead of four: 2.5 times the forward pass instead of 2."""
    shape = describe_model("Qwen3-8B").shape
    core_forward = sum(flops.core for _, flops in model_flops(shape, LENGTHS).parts)
    executed = hardware_flops(shape, LENGTHS, kernels=KernelWork(flash_attention=True))
    assert executed - model_flops(shape, LENGTHS).train == core_forward // 2


def test_delta_rule_kernels(hybrid):
    mixer = hybrid.layers[0].mixer
    assert mixer.core_flops == 4_194_304
    assert mixer.chunked_forward_flops(64) == 5_767_168
    assert mixer.chunked_backward_flops(64) == 16_252_928
    kernels = KernelWork(delta_rule_chunk_tokens=64)
    once = 30 * 4096 * (5_767_168 + 16_252_928 - 3 * 4_194_304)
    assert hardware_flops(hybrid, LENGTHS, kernels=kernels) == model_flops(hybrid, LENGTHS).train + once
    recomputed = hardware_flops(hybrid, LENGTHS, Recompute("full"), kernels)
    assert recomputed == 99_935_835_914_240 + once + 30 * 4096 * (5_767_168 - 4_194_304)


def test_recomputed_head(hybrid):
    executed = hardware_flops(hybrid, LENGTHS, kernels=KernelWork(head_recompute=True))
    assert executed == model_flops(hybrid, LENGTHS).train + 4096 * hybrid.head_flops


def test_padding_counts_in_executed_work_only(hybrid):
    real, padded = (1000, 500), (1024, 512)
    assert hardware_flops(hybrid, padded) == model_flops(hybrid, padded).train > model_flops(hybrid, real).train


def test_the_head_of_a_prediction_layer_is_recomputed_too():
    shape = describe_model(HYBRID_CONFIG | {"mtp_num_hidden_layers": 1}).shape
    again = hardware_flops(shape, LENGTHS, kernels=KernelWork(head_recompute=True)) - model_flops(shape, LENGTHS).train
    assert again == 2 * 4096 * shape.head_flops
