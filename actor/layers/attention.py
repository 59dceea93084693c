"""Causal softmax attention over packed sequences, with context parallelism and an optional output gate."""

import math
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule

from actor.layers.context_parallel import gather_tokens
from actor.layers.fusion import fused
from actor.layers.packed import PackedSequences
from actor.layers.rope import rotate
from rlpipe.jit_monitor import host_integer, refuse_recompiling_flash_attention


class PackedAttention(SelfAttention):
    """Megatron's self-attention parameters with a forward for packs only.

    The stock forward reads sequence lengths from the device in every layer (rope_utils.py:178); here the rotary table
    is per token and lengths are host integers. It also gates only the heads that this rank holds where TP is larger
    than the number of key/value heads, which stock code does not.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states: [t, 1, h] (a 1/TP slice of it under sequence parallelism); returns (output, bias)."""
        assert packed_seq_params is not None and rotary_pos_emb is not None
        gated = self.config.attention_output_gate
        query, key, value, *gate = self.get_query_key_value_tensors(hidden_states, output_gate=gated)
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        query, key = rotate(query, rotary_pos_emb), rotate(key, rotary_pos_emb)
        if self.checkpoint_core_attention and self.training:
            context = self._recomputed_attention(query, key, value, packed_seq_params)
        else:
            context = self.core_attention(query, key, value, packed_seq_params)
        context = gate_output(context, self._own_heads(gate[0].squeeze(1))) if gated else context.flatten(1)
        return self.linear_proj(context.unsqueeze(1))

    def _recomputed_attention(self, *inputs: Any) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.core_attention, *inputs, use_reentrant=False)

    def _own_heads(self, gate: torch.Tensor) -> torch.Tensor:
        """[t, heads of the group, d] -> this rank's heads of it, as `get_query_key_value_tensors` does for queries."""
        sharing = self.world_size // self.config.num_query_groups
        if sharing <= 1:
            return gate
        heads = gate.shape[1] // sharing
        first = (self.tp_group.rank() % sharing) * heads
        return gate[:, first : first + heads]


@fused
def gate_output(context: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """context x sigmoid(gate). context, gate: [t, heads, head_dim]; returns [t, heads x head_dim]."""
    return (context * torch.sigmoid(gate)).flatten(1)


class PackedCoreAttention(MegatronModule):
    """softmax(q k^T) v within each sequence. No parameters.

    Under context parallelism keys and values of the whole pack are gathered (the backward sums over ranks), and each
    of the rank's two pieces per sequence attends to the part of its sequence that precedes its own end.
    """

    def __init__(
        self, config: Any, *, softmax_scale: float | None = None, pg_collection: Any = None, **_: object
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.context_group = pg_collection.cp

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: PackedSequences
    ) -> torch.Tensor:
        """query: [t, heads, d]; key, value: [t, kv_heads, d] of this rank's tokens; returns [t, heads, d]."""
        if self.context_group.size() == 1:
            ends, tensor = sequences.ends, sequences.ends_tensor
            return causal_attention(query, key, value, ends, ends, tensor, tensor, self.scale)
        key_value = gather_tokens(torch.stack((key, value), 1), self.context_group)
        prefixes = sequences.prefixes
        key_value = key_value.index_select(0, sequences.to_global.index_select(0, prefixes.key_rows))
        return causal_attention(
            query,
            key_value[:, 0],
            key_value[:, 1],
            prefixes.query_ends,
            prefixes.key_ends,
            prefixes.query_ends_tensor,
            prefixes.key_ends_tensor,
            self.scale,
        )

    def sharded_state_dict(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """Nothing to save."""
        return {}


def check_flash_attention() -> None:
    """ActorError where packed attention would run on a FlashAttention-4 that compiles without end."""
    chosen = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    if chosen == "FA4":
        refuse_recompiling_flash_attention()


_FLASH_DTYPES = (torch.bfloat16, torch.float16)


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: tuple[int, ...],
    key_ends: tuple[int, ...],
    query_ends_tensor: torch.Tensor,
    key_ends_tensor: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of segment i of the queries to segment i of the keys; the last query sees the last key (bottom right).

    query: [t, heads, d]; key, value: [s, kv_heads, d], heads a multiple of kv_heads; returns [t, heads, d].
    """
    if query.is_cuda and query.dtype in _FLASH_DTYPES:
        import torch.nn.attention.varlen as varlen

        varlen_attn: Any = varlen.varlen_attn

        longest = (host_integer("max_seqlen_q", _longest(query_ends)), host_integer("max_seqlen_k", _longest(key_ends)))
        options: Any = _grouped_heads_option(varlen_attn) if query.shape[1] != key.shape[1] else {}
        return varlen_attn(
            query,
            key,
            value,
            query_ends_tensor,
            key_ends_tensor,
            *longest,
            scale=scale,
            window_size=(-1, 0),
            **options,
        )
    if query_ends == key_ends:
        return _causal_in_batches(query, key, value, query_ends, scale)
    # Not slices: the backward of n slices writes n whole gradients, the one of a split a single one.
    segments = zip(
        query.split(_lengths(query_ends)), key.split(_lengths(key_ends)), value.split(_lengths(key_ends)), strict=True
    )
    return torch.cat([_bottom_right_causal(q, k, v, scale) for q, k, v in segments])


def _grouped_heads_option(varlen_attn: Any) -> dict[str, bool]:
    """torch 2.11 takes fewer key/value heads as they are; from 2.12 on it wants to be told."""
    import inspect

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _longest(ends: tuple[int, ...]) -> int:
    return max(b - a for a, b in zip(ends, ends[1:], strict=False))


def _lengths(ends: tuple[int, ...]) -> list[int]:
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


def _causal_in_batches(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: tuple[int, ...], scale: float
) -> torch.Tensor:
    """Self-attention without a packed kernel: segments of like length, padded at the right, are one batch.

    Right padding needs no mask under causal attention, as only the padding's own rows see it. One call for each
    segment would be ten times slower at a hundred short segments a pack.
    """
    lengths = _lengths(ends)
    buckets: dict[int, list[int]] = {}
    for segment, length in enumerate(lengths):
        if length:
            buckets.setdefault(length.bit_length(), []).append(segment)
    outputs, positions = [], []
    for members in buckets.values():
        longest = max(lengths[segment] for segment in members)
        starts = torch.tensor([ends[segment] for segment in members], device=query.device)
        sizes = torch.tensor([lengths[segment] for segment in members], device=query.device)
        offsets = torch.arange(longest, device=query.device)
        real = offsets < sizes[:, None]
        rows = torch.where(real, starts[:, None] + offsets, 0)
        q, k, v = (x[rows].transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(out.transpose(1, 2)[real])
        positions.append(rows[real])
    order = torch.cat(positions).argsort()
    return torch.cat(outputs)[order]


def _bottom_right_causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    queries, keys = query.shape[0], key.shape[0]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
