"""Operators of Qwen3.5 in plain torch; SGLang's model file looks them up when it is imported."""

import torch

from sgl_kernel.registration import operator


@operator
def fused_sigmoid_mul_cpu(x, gate, inplace=True):
    """x * sigmoid(gate), elementwise; into `x` when `inplace`."""
    return x.mul_(torch.sigmoid(gate)) if inplace else x * torch.sigmoid(gate)


@operator
def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim):
    """Per-head RMSNorm of queries and keys, each returned as [tokens x heads, head_dim]."""
    return _gemma_rmsnorm(q, q_weight, eps, head_dim), _gemma_rmsnorm(k, k_weight, eps, head_dim)


@operator
def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, num_heads):
    """The same where each query head is followed by its output gate; returns queries, keys, gates."""
    q, gate = q_gate.reshape(-1, num_heads, 2 * head_dim).chunk(2, -1)
    q, k = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.contiguous()


@operator
def fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, key_heads, value_heads, key_dim, value_dim):
    """Splits the two input projections of a gated-delta-net layer into (q|k|v), z, b, a."""
    qkv, z = qkvz.split([2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim], -1)
    b, a = ba.split([value_heads, value_heads], -1)
    return qkv.contiguous(), z.reshape(-1, value_heads, value_dim), b.contiguous(), a.contiguous()


def _gemma_rmsnorm(x, weight, eps, width):
    """RMSNorm whose weight is stored as its difference from one."""
    wide = x.reshape(-1, width).float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * (1 + weight.float())).to(x.dtype)
