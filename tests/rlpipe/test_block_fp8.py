"""Weights in 8 bits: which ones, and their numbers."""

import pytest
import torch

from rlpipe.shared.block_fp8 import quantize_blocks, quantized
from rlpipe.shared.quantization import is_quantized, is_quantized_module, specs_as_sent
from rlpipe.shared.weights import TensorSpec


@pytest.mark.parametrize("shape", [(256, 128), (300, 200), (3, 130, 256)])
def test_blocks_are_quantized_as_a_loop_over_them_does(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape).bfloat16() * torch.rand(shape[-2])[:, None].bfloat16()
    weight[..., :128, :128] = 0
    numbers, scales = quantize_blocks(weight)
    flat, flat_numbers, flat_scales = (
        weight.reshape(-1, *shape[-2:]),
        *(one.reshape(-1, *one.shape[-2:]) for one in (numbers, scales)),
    )
    for index, matrix in enumerate(flat):
        for row in range(0, shape[-2], 128):
            for column in range(0, shape[-1], 128):
                block = matrix[row : row + 128, column : column + 128].float()
                scale = block.abs().max() / 448 if block.any() else torch.tensor(1.0)
                assert flat_scales[index, row // 128, column // 128] == scale
                found = flat_numbers[index, row : row + 128, column : column + 128].float()
                assert torch.equal(found, (block / scale).to(torch.float8_e4m3fn).float())
                assert ((found * scale - block).abs() <= block.abs() / 16 + scale / 512).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_in_8_bits_and_harms_no_other_block(value):
    weight = torch.ones(2, 256, 256).bfloat16()
    weight[1, 3, 200] = value
    numbers, scales = quantize_blocks(weight)
    found = numbers.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert not found[1, 3, 200].isfinite()
    found[1, :128, 128:] = 1
    assert torch.equal(found, torch.ones_like(found))


@pytest.mark.parametrize("size", [torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).tiny])
def test_the_largest_and_the_smallest_weights_survive(size):
    weight = torch.full((128, 128), size, dtype=torch.bfloat16)
    weight[0] = 0
    numbers, scales = quantize_blocks(weight)
    found = numbers.double() * scales.double()
    assert torch.allclose(found, weight.double(), rtol=1e-3, atol=0)


def test_what_stays_in_bfloat16_is_the_same_for_tensors_and_for_modules():
    pairs = {
        "model.layers.3.self_attn.q_proj.weight": "model.layers.3.self_attn.qkv_proj",
        "model.layers.3.self_attn.o_proj.weight": "model.layers.3.self_attn.o_proj",
        "model.layers.0.mlp.experts.gate_up_proj": "model.layers.0.mlp.experts",
        "model.layers.0.mlp.experts.64-127.gate_up_proj": "model.layers.0.mlp.experts",
        "mtp.layers.0.mlp.experts.7.down_proj.weight": "mtp.layers.0.mlp.experts",
        "model.layers.0.mlp.shared_expert.up_proj.weight": "model.layers.0.mlp.shared_expert.gate_up_proj",
        "model.layers.0.mlp.down_proj.weight": "model.layers.0.mlp.down_proj",
    }
    assert all(
        is_quantized(name, "fp8_all") and is_quantized_module(module, "fp8_all") for name, module in pairs.items()
    )
    for name, module in pairs.items():
        expert = ".experts" in name
        assert is_quantized(name, "fp8") == is_quantized_module(module, "fp8") == expert
        assert not is_quantized(name, "none") and not is_quantized_module(module, "none")
    others = {
        "model.layers.0.linear_attn.out_proj.weight": "model.layers.0.linear_attn.out_proj",
        "model.layers.0.linear_attn.in_proj_qkv.weight": "model.layers.0.linear_attn.in_proj_qkvz",
        "model.layers.0.mlp.gate.weight": "model.layers.0.mlp.gate",
        "model.layers.0.mlp.shared_expert_gate.weight": "model.layers.0.mlp.shared_expert_gate",
        "model.layers.3.self_attn.q_norm.weight": "model.layers.3.self_attn.q_norm",
        "lm_head.weight": "lm_head",
        "mtp.fc.weight": "fc",
        "model.visual.blocks.0.mlp.up_proj.weight": "model.visual.blocks.0.mlp.up_proj",
    }
    for kind in ("fp8_all", "fp8"):
        assert not any(is_quantized(name, kind) or is_quantized_module(module, kind) for name, module in others.items())


@pytest.mark.parametrize("shape", [(300, 200), (2, 130, 256)])
def test_what_is_told_of_tensors_before_is_what_quantising_them_gives(shape):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for kind in ("none", "fp8", "fp8_all"):
        told = specs_as_sent(TensorSpec(name, "bfloat16", shape), kind)
        made = [
            (part, str(tensor.dtype), tuple(tensor.shape))
            for part, tensor in quantized(name, torch.ones(shape, dtype=torch.bfloat16), kind)
        ]
        assert [(spec.name, f"torch.{spec.dtype}", spec.shape) for spec in told] == made
