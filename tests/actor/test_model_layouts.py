"""A parallel layout that does not divide the model is refused in one sentence that names both numbers."""

import json

import pytest
from model_support import DENSE, GDN, GDN_MOE, MOE, SHARED, TinyModel, in_worker
from train_support import run_processes

REFUSALS = {
    "heads": (DENSE, "Qwen3ForCausalLM", {"tensor": 8}, "num_attention_heads = 4"),
    "layers": (DENSE, "Qwen3ForCausalLM", {"pipeline": 3}, "num_hidden_layers = 4"),
    "kv_heads": (
        TinyModel("x", "qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}),
        "Qwen3ForCausalLM",
        {"tensor": 2},
        "num_key_value_heads = 3",
    ),
    "experts": (MOE, "Qwen3MoeForCausalLM", {"expert": 3}, "num_experts = 4"),
    "no_experts": (DENSE, "Qwen3ForCausalLM", {"expert": 2}, "has no experts"),
    "sequence": (MOE, "Qwen3MoeForCausalLM", {"tensor": 2}, "actor.parallel.sequence"),
    "delta_net": (GDN, "Qwen3_5ForCausalLM", {"tensor": 2, "context": 2}, "linear_num_key_heads = 2"),
    "shared": (
        TinyModel("y", "qwen3_5_moe_text", GDN_MOE.changes | {key: 33 for key in SHARED}),
        "Qwen3_5MoeForCausalLM",
        {"tensor": 2, "sequence": True},
        "shared_expert_intermediate_size = 33",
    ),
}


@pytest.fixture(scope="module")
def messages():
    cases = {
        name: (json.loads(model.config().to_json_string()) | {"architectures": [architecture]}, parallel)
        for name, (model, architecture, parallel, _) in REFUSALS.items()
    }
    return run_processes(1, in_worker, ("refused_layouts", cases), ("gdn_kernel_errors",), ("gdn_backend_calls",))[0]


@pytest.mark.parametrize("name", REFUSALS)
def test_an_impossible_layout_is_refused(messages, name):
    assert REFUSALS[name][3] in messages[0][name]


def test_the_chunked_delta_rule_equals_the_recurrence(messages):
    """Outputs and all five gradients against one token at a time in float64; lengths around the chunk size."""
    for name, error in messages[1].items():
        assert error < 1e-5, name


def test_the_fla_backend_gets_unrepeated_heads_and_host_lengths(messages):
    answer = messages[2]
    assert answer["backend"] == "fla"
    assert answer["shapes"] == [(1, 10, 2, 8), (1, 10, 2, 8), (1, 10, 6, 8), (1, 10, 6), (1, 10, 6)]
    assert answer["options"] == ["beta", "cu_seqlens", "cu_seqlens_cpu", "g"]
    assert answer["dtype"] == "torch.int32"
    assert answer["output"] == (10, 6, 8)
    assert answer["flash_qla"] == "0"


def test_multi_token_prediction_needs_its_layer(messages):
    assert "has 0 multi-token-prediction layers" in messages[0]["mtp"]
