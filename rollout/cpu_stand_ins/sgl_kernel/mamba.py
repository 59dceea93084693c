"""Gated-delta-net operators in plain torch (Yang, Kautz, Hatamizadeh: Gated Delta Networks, arXiv:2412.06464).

Shapes: tokens T of all sequences concatenated; N sequences; HK key heads, HV value heads; K and V their widths.
Recurrent states are [slots, HV, K, V], convolution states [slots, channels, kernel - 1]; both are updated in place.
"""

import torch
import torch.nn.functional as F

from rollout.sglang_patches.batch_invariance import by_row
from sgl_kernel.registration import operator

_L2_EPSILON = 1e-6


def causal_conv1d_fn_cpu(
    x,
    weight,
    bias,
    activation,
    conv_states,
    has_initial_state,
    cache_indices,
    query_start_loc,
    seq_lens_cpu,
):
    """Depthwise causal convolution of whole sequences; `x` is [channels, T]."""
    out = torch.empty_like(x)
    starts = query_start_loc.tolist()
    for sequence, slot in enumerate(cache_indices.tolist()):
        tokens = slice(starts[sequence], starts[sequence + 1])
        state = conv_states[slot]
        past = state if has_initial_state[sequence] else torch.zeros_like(state)
        window = torch.cat([past.to(x.dtype), x[:, tokens]], -1)
        conv_states[slot] = window[:, 1 - weight.shape[1] :].to(state.dtype)
        out[:, tokens] = _convolve(window[None], weight, bias, activation)[0]
    return out


def causal_conv1d_update_cpu(x, conv_states, weight, bias, activation, conv_state_indices):
    """The same for one new token of each sequence; `x` is [N, channels]."""
    slots = conv_state_indices.long()
    window = torch.cat([conv_states[slots].to(x.dtype), x.unsqueeze(-1)], -1)
    conv_states[slots] = window[..., 1:].to(conv_states.dtype)
    return _convolve(window, weight, bias, activation).squeeze(-1)


@operator
def fused_gdn_gating_cpu(A_log, a, b, dt_bias):
    """Log decay g and write strength beta, both [1, T, HV] in float32."""
    decay = -by_row(torch.exp, A_log.float()) * by_row(F.softplus, a.float() + dt_bias.float())
    return decay.unsqueeze(0), by_row(torch.sigmoid, b.float()).unsqueeze(0)


def chunk_gated_delta_rule_cpu(
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    cu_seqlens,
    head_first,
    use_qk_l2norm_in_kernel,
    initial_state_indices,
):
    """Whole sequences, token by token; q, k, v are [1, T, heads, width]."""
    out = torch.empty_like(v)
    starts = cu_seqlens.tolist()
    q, k, wide_v = _heads(q, k, v, use_qk_l2norm_in_kernel)
    for sequence, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot][None].float()
        for t in range(starts[sequence], starts[sequence + 1]):
            one = slice(t, t + 1)
            state, y = _step(state, q[one], k[one], wide_v[one], g[0, one], beta[0, one])
            out[0, t] = y[0].to(out.dtype)
        initial_state[slot] = state[0].to(initial_state.dtype)
    return out, None, None


@operator
def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log,
    dt_bias,
    q,
    k,
    v,
    a,
    b,
    initial_state_source,
    initial_state_indices,
    cu_seqlens,
    use_qk_l2norm_in_kernel,
    softplus_beta,
    softplus_threshold,
):
    """One new token of each sequence."""
    slots = initial_state_indices.long()
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    q, k, wide_v = _heads(q, k, v, use_qk_l2norm_in_kernel)
    state, y = _step(initial_state_source[slots].float(), q, k, wide_v, g[0], beta[0])
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    return y.to(v.dtype).unsqueeze(0)


def _convolve(window, weight, bias, activation):
    """Window [N, channels, outputs + kernel - 1] to [N, channels, outputs]; tap by tap, so that N cannot matter."""
    taps = weight.shape[1]
    outputs = window.shape[-1] - taps + 1
    y = sum(window[..., tap : tap + outputs] * weight[:, tap, None] for tap in range(taps))
    if bias is not None:
        y = y + bias[:, None]
    return y * by_row(torch.sigmoid, y.flatten(1)).view(y.shape) if activation in ("silu", "swish") else y


def _heads(q, k, v, l2_normalize):
    """float32 [T, HV, width] of each, queries scaled and both repeated to the value heads."""
    q, k, v = q[0].float(), k[0].float(), v[0].float()
    if l2_normalize:
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + _L2_EPSILON)
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + _L2_EPSILON)
    repeats = v.shape[1] // q.shape[1]
    q = q * q.shape[-1] ** -0.5
    return q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1), v


def _step(state, q, k, v, g, beta):
    """One token of N sequences: state [N, HV, K, V]; q, k [N, HV, K]; v [N, HV, V]; g, beta [N, HV].

    Products are elementwise sums, not matrix products, so that a sequence's result cannot depend on N.
    """
    state = state * by_row(torch.exp, g)[..., None, None]
    read = (state * k[..., None]).sum(-2)
    state = state + k[..., None] * ((v - read) * beta[..., None])[..., None, :]
    return state, (state * q[..., None]).sum(-2)
