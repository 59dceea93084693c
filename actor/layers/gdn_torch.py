"""Gated DeltaNet's kernels in plain torch: the heads after the short convolution, and the chunked gated delta rule.

Per head and token, with state S [K, V]:  S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q.
The chunked form (Yang et al. 2024, arXiv:2412.06464, section 3.3) turns 64 tokens into matrix products, with the WY
representation of their product of Householder-like steps from one unit-triangular solve.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from actor.layers.packed import PackedSequences

CHUNK_TOKENS = 64


def causal_convolution(x: torch.Tensor, weight: torch.Tensor, sequences: PackedSequences) -> torch.Tensor:
    """silu of a depthwise causal convolution. x: [T, c]; weight: [c, width]; no token sees another sequence."""
    width = weight.shape[1]
    positions = np.concatenate([np.arange(end - start) for start, end in pairwise(sequences.ends)])
    out = x * weight[:, -1]
    for back in range(1, width):
        shifted = F.pad(x, (0, 0, back, 0))[: x.shape[0]]
        visible = torch.from_numpy(positions >= back).to(x.device)
        out = out + torch.where(visible[:, None], shifted, 0) * weight[:, width - 1 - back]
    return F.silu(out)


def projected_heads(
    projected: torch.Tensor,
    weights: Sequence[torch.Tensor],
    channels: tuple[int, int],
    sequences: PackedSequences,
) -> tuple[torch.Tensor, ...]:
    """See `GdnKernels.heads`."""
    *mixed, z, beta, alpha = split_sections(projected, weights)
    query, key, value = (
        causal_convolution(part, weight, sequences).unflatten(-1, (-1, width))
        for part, weight, width in zip(mixed, weights, (channels[0], *channels), strict=True)
    )
    return unit_heads(query), unit_heads(key), value, z, beta, alpha


def split_sections(projected: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Columns of query, key, value, z, beta and alpha; z is as wide as value, and the last two share what is left."""
    widths = [len(weight) for weight in weights]
    heads = (projected.shape[1] - sum(widths) - widths[2]) // 2
    return projected.split([*widths, widths[2], heads, heads], -1)


@dataclass(frozen=True)
class ChunkPlan:
    """Where tokens stand when every sequence is cut into chunks of `CHUNK_TOKENS`, its last one filled up.

    slots: int64 [T], the slot of each token among `chunks` x CHUNK_TOKENS slots. steps: for each depth, the chunks
    that are at this depth of their sequence, longest sequence first, so that the sequences still running at a depth
    are a prefix of those of the depth before.
    """

    chunks: int
    slots: torch.Tensor
    steps: list[torch.Tensor]


@lru_cache(maxsize=4)
def plan_chunks(ends: tuple[int, ...], device: torch.device) -> ChunkPlan:
    """Made from host integers; the device is never read. Kept for the layers and passes of the same pack."""
    lengths = np.diff(np.asarray(ends))
    counts = -(-lengths // CHUNK_TOKENS)
    first = np.concatenate([[0], np.cumsum(counts)])
    slots = np.concatenate(
        [np.arange(length) + start * CHUNK_TOKENS for length, start in zip(lengths, first[:-1], strict=True)]
    )
    order = np.argsort(-counts, kind="stable")
    steps = [first[:-1][order][counts[order] > depth] + depth for depth in range(int(counts.max()))]
    on_device = [torch.from_numpy(rows).to(device) for rows in (slots, *steps)]
    return ChunkPlan(int(first[-1]), on_device[0], on_device[1:])


def chunked_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    sequences: PackedSequences,
) -> torch.Tensor:
    """See `GdnKernels.delta_rule`; computed in float32, returned in `value`'s dtype."""
    plan = plan_chunks(sequences.ends, value.device)
    share = value.shape[1] // key.shape[1]
    # [chunks, key heads, value heads per key head (1 for q and k), 64, channels]
    q = _to_chunks(query.float() * query.shape[-1] ** -0.5, plan, 1)
    k = _to_chunks(key.float(), plan, 1)
    v = _to_chunks(value.float(), plan, share)
    b = _to_chunks(beta.unsqueeze(-1), plan, share)
    g = _to_chunks(decay.unsqueeze(-1), plan, share).cumsum(-2)

    within = (g - g.transpose(-1, -2)).tril().exp().tril()
    overlap = (b * (k @ k.transpose(-1, -2)) * within).tril(-1)
    identity = torch.eye(CHUNK_TOKENS, dtype=overlap.dtype, device=overlap.device)
    updates = torch.linalg.solve_triangular(
        overlap + identity, torch.cat((b * v, b * k * g.exp()), -1), upper=False, unitriangular=True
    )
    new_values, seen_keys = updates.split((v.shape[-1], k.shape[-1]), -1)
    scores = (q @ k.transpose(-1, -2)) * within
    out = _scan(plan, q * g.exp(), k * (g[..., -1:, :] - g).exp(), new_values, seen_keys, scores, g[..., -1:, :].exp())
    return out.transpose(2, 3).transpose(1, 2).flatten(0, 1)[plan.slots].flatten(1, 2).to(value.dtype)


def _scan(
    plan: ChunkPlan,
    query: torch.Tensor,
    key: torch.Tensor,
    new_values: torch.Tensor,
    seen_keys: torch.Tensor,
    scores: torch.Tensor,
    kept: torch.Tensor,
) -> torch.Tensor:
    """Carry the state from chunk to chunk, all sequences side by side. Returns [chunks, HK, share, 64, V]."""
    heads = new_values.shape[1:3]
    state = new_values.new_zeros(len(plan.steps[0]), *heads, query.shape[-1], new_values.shape[-1])
    outputs = []
    for chunks in plan.steps:
        state = state[: len(chunks)]
        values = new_values[chunks] - seen_keys[chunks] @ state
        outputs.append(query[chunks] @ state + scores[chunks] @ values)
        state = kept[chunks] * state + key[chunks].transpose(-1, -2) @ values
    order = torch.cat(plan.steps)
    return torch.cat(outputs)[torch.argsort(order)]


def unit_heads(x: torch.Tensor) -> torch.Tensor:
    """[..., channels] divided by their norm, which is taken in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _to_chunks(x: torch.Tensor, plan: ChunkPlan, share: int) -> torch.Tensor:
    """[T, heads, d] -> [chunks, heads / share, share, 64, d]; the filling is zero, which leaves the state alone."""
    slots = x.new_zeros(plan.chunks * CHUNK_TOKENS, *x.shape[1:]).index_copy(0, plan.slots, x)
    blocks = slots.view(plan.chunks, CHUNK_TOKENS, -1, share, x.shape[-1])
    return blocks.permute(0, 2, 3, 1, 4)
