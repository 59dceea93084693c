"""Decoding attention of a CPU engine: SGLang's, for many requests in one call."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

_POSITIONS_MULTIPLE = 32
_PADDING_SLOT = 0  # SGLang keeps it free for writes that nobody reads


def decode_attention(
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """One query token of each request against its own keys and values.

    query, output [requests, heads, head_dim]; caches [slots, key_value_heads, head_dim]; `req_to_token`
    [pool rows, positions] holds each request's cache slots. The name and the arguments are those of
    `TorchNativeAttnBackend._run_sdpa_forward_decode`.

    Requests whose lengths round up to the same multiple are one batch. The padded length follows from a request's own
    length alone and the kernel computes each row by itself, so the answer does not depend on the other requests.
    """
    if encoder_lens is not None or sliding_window_size is not None:
        raise NotImplementedError("cross attention and sliding windows have no fast CPU form")
    padded = -(-seq_lens // _POSITIONS_MULTIPLE) * _POSITIONS_MULTIPLE
    for positions in padded.unique().tolist():
        members = (padded == positions).nonzero().squeeze(1)
        real = torch.arange(positions) < seq_lens[members, None]
        slots = torch.where(real, _slots(req_to_token, req_pool_indices[members], positions), _PADDING_SLOT)
        keys = k_cache[slots].transpose(1, 2).to(query.dtype)
        values = v_cache[slots].transpose(1, 2).to(query.dtype)
        attended = scaled_dot_product_attention(
            query[members, :, None], keys, values, attn_mask=real[:, None, None], scale=scaling, enable_gqa=enable_gqa
        )
        output[members] = attended[:, :, 0]
    return output


def _slots(req_to_token: torch.Tensor, rows: torch.Tensor, positions: int) -> torch.Tensor:
    """int64 [requests, positions]; the table may be narrower than the last multiple."""
    slots = req_to_token[rows, :positions].long()
    return torch.nn.functional.pad(slots, (0, positions - slots.shape[1]))
