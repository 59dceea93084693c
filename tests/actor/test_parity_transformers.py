"""Log-probabilities and every parameter's gradient equal transformers', packed against one sequence at a time."""

from itertools import pairwise

import pytest
import torch
from model_support import (
    DENSE,
    EXPERTS,
    GDN,
    GDN_MOE,
    HYBRID,
    MOE,
    SHARED,
    TinyModel,
    in_worker,
    transformers_answer,
    write_checkpoint,
)
from train_support import make_pack, run_processes

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3}
NEXT = HYBRID | EXPERTS | SHARED
MODELS = [
    DENSE,
    MOE,
    GDN,
    GDN_MOE,
    TinyModel("dense_tied", "qwen3", {"tie_word_embeddings": True}),
    TinyModel("dense_odd_heads", "qwen3", {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 24}),
    TinyModel("qwen2", "qwen2", {"head_dim": None, "num_attention_heads": 6}),
    TinyModel(
        "qwen2_tied",
        "qwen2",
        THREE_HEADS | {"head_dim": None, "tie_word_embeddings": True},
    ),
    TinyModel("llama", "llama", {"head_dim": None, "num_attention_heads": 6}),
    TinyModel("llama3_rope", "llama", {"rope_parameters": LLAMA3_ROPE}),
    TinyModel("moe_not_normalized", "qwen3_moe", EXPERTS | {"norm_topk_prob": False}),
    TinyModel("moe_only_layers", "qwen3_moe", EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [0, 3]}),
    TinyModel("moe_sparse_step", "qwen3_moe", EXPERTS | {"norm_topk_prob": True, "decoder_sparse_step": 2}),
    TinyModel("moe_odd_width", "qwen3_moe", EXPERTS | {"norm_topk_prob": True, "moe_intermediate_size": 11}),
    TinyModel("moe_top1", "qwen3_moe", EXPERTS | {"norm_topk_prob": False, "num_experts_per_tok": 1}),
    TinyModel("moe_top1_normalized", "qwen3_moe", EXPERTS | {"norm_topk_prob": True, "num_experts_per_tok": 1}),
    TinyModel("next", "qwen3_next", NEXT),
    TinyModel("next_half_rotary", "qwen3_next", NEXT | {"partial_rotary_factor": 0.5, "norm_topk_prob": False}),
    TinyModel("next_equal_heads", "qwen3_next", NEXT | {"linear_num_value_heads": 2, "linear_value_head_dim": 16}),
    TinyModel("next_mlp_only", "qwen3_next", NEXT | {"mlp_only_layers": [1], "tie_word_embeddings": True}),
    TinyModel("gdn_many_values", "qwen3_5_text", HYBRID | {"linear_num_key_heads": 1, "linear_num_value_heads": 3}),
    TinyModel("gdn_full_rotary", "qwen3_5_text", HYBRID | {"partial_rotary_factor": 1.0, "tie_word_embeddings": True}),
    TinyModel("gdn_only", "qwen3_5_text", HYBRID | {"layer_types": ["linear_attention"] * 4}),
    TinyModel(
        "gdn_moe_odd",
        "qwen3_5_moe_text",
        GDN_MOE.changes | THREE_HEADS | {"num_experts": 6},
    ),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("transformers")
    pack = make_pack([1, 2, 12, 30, 65, 70], seed=5, denominator=1.0)
    cases = {}
    for model in MODELS:
        path = write_checkpoint(model, folder)
        cases[model.name] = (path, pack, *transformers_answer(path, pack))
    return run_processes(1, in_worker, ("compare_with_transformers", cases))[0][0]


@pytest.mark.parametrize("name", [model.name for model in MODELS])
def test_logprobs_and_gradients_equal_transformers(results, name):
    assert not isinstance(results[name], str), results[name]
    logprob_error, gradient_errors = results[name]
    assert logprob_error < 2e-5
    worst = max(gradient_errors, key=lambda tensor: gradient_errors[tensor])
    assert gradient_errors[worst] < 1e-4, f"{worst}: {gradient_errors[worst]}"


def test_the_pack_has_several_sequences_and_odd_lengths():
    pack = make_pack([1, 2, 12, 30, 65, 70], seed=5, denominator=1.0)
    assert {b - a for a, b in pairwise(pack.cu_seqlens)} == {1, 2, 12, 30, 65, 70}
    assert torch.from_numpy(pack.loss_mask).sum() > 150
