"""Causal softmax attention over packed sequences, with context parallelism and an optional output gate."""

import math
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule

from actor.layers.causal_attention import Segments, causal_attention
from actor.layers.context_parallel import gather_tokens
from actor.layers.fusion import fused
from actor.layers.packed import PackedSequences
from actor.layers.rope import rotate


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
        # Values are rows of the projection that queries and keys come from, which would stay for the backward pass as a
        # whole; of queries and keys their norms have copies.
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1).contiguous()
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
            segments = Segments(sequences.ends, sequences.ends_tensor)
            return causal_attention(query, key, value, segments, segments, self.scale)
        key_value = gather_tokens(torch.stack((key, value), 1), self.context_group)
        prefixes = sequences.prefixes
        key_value = key_value.index_select(0, sequences.to_global.index_select(0, prefixes.key_rows))
        queries = Segments(prefixes.query_ends, prefixes.query_ends_tensor)
        keys = Segments(prefixes.key_ends, prefixes.key_ends_tensor)
        return causal_attention(query, key_value[:, 0], key_value[:, 1], queries, keys, self.scale)

    def sharded_state_dict(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """Nothing to save."""
        return {}
