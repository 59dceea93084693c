"""The formulas against torch's own count of the operators that transformers' models execute.

Eager attention computes the whole square, so the convention is `full`. The count also sees the outer product that
makes the rotary angles, which the formulas leave out like all elementwise work.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from rlpipe.flops import Convention, Grid, model_flops
from rlpipe.flops.layers import GatedDeltaNet
from rlpipe.model.model_reader import describe_model

TOKENS = 64
DELTA_NET_CHUNK_TOKENS = 64

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
ODD_HEAD = {"head_dim": 12}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
SHARED = {"shared_expert_intermediate_size": 20}
ROUTED_AND_SHARED = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {"kv_lora_rank": 14, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 4}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}

MODELS = {
    "llama": ("llama", {}),
    "llama, odd head": ("llama", ODD_HEAD),
    "mistral, window": ("mistral", {"sliding_window": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window from layer 2": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen2_moe, every other layer": ("qwen2_moe", EXPERTS | SHARED | {"decoder_sparse_step": 2}),
    "qwen3, odd head": ("qwen3", ODD_HEAD),
    "qwen3_moe, dense layer 1": ("qwen3_moe", EXPERTS | ODD_HEAD | {"mlp_only_layers": [1]}),
    "glm4_moe": ("glm4_moe", ROUTED_AND_SHARED | ODD_HEAD | {"first_k_dense_replace": 1}),
    "deepseek_v3": ("deepseek_v3", ROUTED_AND_SHARED | LATENT | {"q_lora_rank": 10, "first_k_dense_replace": 2}),
    "deepseek_v2": ("deepseek_v2", ROUTED_AND_SHARED | LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1}),
    "qwen3_next": ("qwen3_next", EXPERTS | SHARED | ODD_HEAD | DELTA_NET | {"mlp_only_layers": [0]}),
    "qwen3_5 dense": ("qwen3_5_text", ODD_HEAD | DELTA_NET),
    "qwen3_5 experts": (
        "qwen3_5_moe_text",
        EXPERTS | SHARED | ODD_HEAD | DELTA_NET | {"layer_types": ["linear_attention", "full_attention"] * 2},
    ),
}


@pytest.mark.parametrize(("model_type", "options"), MODELS.values(), ids=MODELS)
def test_forward_flops_equal_the_executed_operators(model_type, options):
    config = AutoConfig.for_model(model_type, **(BASE | options))
    counted, rotary = _count_forward(config)
    shape = describe_model(config.to_dict()).shape
    expected = model_flops(shape, [TOKENS], Convention.FULL).forward + _delta_net_extra(shape)
    assert counted == expected + rotary


def test_backward_is_twice_the_forward():
    config = AutoConfig.for_model("llama", **BASE)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False).logits.sum().backward()
    breakdown = model_flops(describe_model(config.to_dict()).shape, [TOKENS], Convention.FULL)
    assert counter.get_total_flops() == breakdown.train + 8 * TOKENS  # the rotary product, of head width 8


def test_vision_tower_equals_the_executed_operators():
    config = Qwen3VLVisionConfig(
        depth=3, hidden_size=32, intermediate_size=40, num_heads=4, out_hidden_size=24, deepstack_visual_indexes=[0, 1]
    )
    tower = Qwen3VLVisionModel._from_config(config, attn_implementation="eager")
    grids = [Grid(1, 4, 6), Grid(3, 2, 4)]
    patches = torch.zeros(sum(grid.patches for grid in grids), 3 * 2 * 16 * 16)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        tower(patches, grid_thw=torch.tensor(grids))
    text = BASE | {"model_type": "qwen3_vl_text"}
    shape = describe_model({"model_type": "qwen3_vl", "text_config": text, "vision_config": config.to_dict()}).shape
    assert counter.get_total_flops() == model_flops(shape, [], grids=grids).per_layer_type["vision"]


def _count_forward(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.config._experts_implementation = "eager"
    ids = torch.randint(0, config.vocab_size, (1, TOKENS))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False)
    position_axes = 3 if config.model_type.startswith("qwen3_5") else 1
    return counter.get_total_flops(), position_axes * 2 * model.model.rotary_emb.inv_freq.numel() * TOKENS


def _delta_net_extra(shape):
    """transformers' torch code runs the delta rule in chunks and its convolution over `width - 1` outputs more."""
    mixers = [layer.mixer for layer in shape.layers if isinstance(layer.mixer, GatedDeltaNet)]
    cores = sum(TOKENS * (m.chunked_forward_flops(DELTA_NET_CHUNK_TOKENS) - m.core_flops) for m in mixers)
    channels = [2 * m.key_heads * m.key_head_dim + m.value_heads * m.value_head_dim for m in mixers]
    overhang = sum(2 * m.conv_width * width * (m.conv_width - 1) for m, width in zip(mixers, channels, strict=True))
    return cores + overhang
