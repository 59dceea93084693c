"""Attention of a CPU engine: a token's answer is the same whether it was decoded, or read as part of a prompt.

So it does not matter which part of a prompt was in the cache: keys and values have the bits that they have without it.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

_POSITIONS_MULTIPLE = 32
_PADDING_SLOT = 0  # SGLang keeps it free for writes that nobody reads
_ROOM_BYTES = 4 * 2**20


class _Rooms:
    """Memory that is kept for gathered keys (0) and values (1): the system would give fresh one page by page."""

    def __init__(self) -> None:
        self._rooms = [torch.empty(0), torch.empty(0)]

    def gather(self, which: int, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[requests, key_value_heads, positions, head_dim], valid until the next call for the same `which`."""
        elements = slots.numel() * cache[0].numel()
        room = self._rooms[which]
        if room.dtype != cache.dtype or len(room) < elements:
            room = self._rooms[which] = torch.empty(elements, dtype=cache.dtype)
        gathered = room[:elements].view(slots.numel(), *cache.shape[1:])
        torch.index_select(cache, 0, slots.flatten(), out=gathered)
        return gathered.view(*slots.shape, *cache.shape[1:]).transpose(1, 2)


class DecodeAttention:
    """One query token of each request against its own keys and values.

    Stands for `TorchNativeAttnBackend._run_sdpa_forward_decode` and takes its arguments, but for the backend.

    Requests whose lengths round up to the same multiple are one batch. The padded length follows from a request's own
    length alone and the kernel computes each row by itself, so the answer does not depend on the other requests.

    Keys and values are gathered for as many requests at a time as fit into 4 MiB: what is small is still in the
    processor's cache when it is read.
    """

    def __init__(self) -> None:
        self._rooms = _Rooms()

    def __call__(
        self,
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
        """query, output [requests, heads, head_dim]; caches [slots, key_value_heads, head_dim]; `req_to_token`
        [pool rows, positions] holds each request's cache slots."""
        if encoder_lens is not None or sliding_window_size is not None:
            raise NotImplementedError("cross attention and sliding windows have no fast CPU form")
        padded = -(-seq_lens // _POSITIONS_MULTIPLE) * _POSITIONS_MULTIPLE
        for positions in padded.unique().tolist():
            at_once = max(1, _ROOM_BYTES // (positions * k_cache[0].nbytes))
            for members in (padded == positions).nonzero().squeeze(1).split(at_once):
                real = torch.arange(positions) < seq_lens[members, None]
                slots = torch.where(real, _slots(req_to_token, req_pool_indices[members], positions), _PADDING_SLOT)
                attended = scaled_dot_product_attention(
                    query[members, :, None],
                    self._rooms.gather(0, k_cache, slots).to(query.dtype),
                    self._rooms.gather(1, v_cache, slots).to(query.dtype),
                    attn_mask=real[:, None, None],
                    scale=scaling,
                    enable_gqa=enable_gqa,
                )
                output[members] = attended[:, :, 0]
        return output


class PrefillAttention:
    """Query tokens of each prompt against the keys and values before them, those of a cached prefix included.

    Stands for `TorchNativeAttnBackend._run_sdpa_forward_extend` and takes its arguments, but for the backend.

    Each token is a row of its own, with the padded length that it would have if it were decoded, so it gets the bits
    that `DecodeAttention` gives. Tokens of one padded length are one batch over the same keys and values.
    """

    def __init__(self) -> None:
        self._rooms = _Rooms()

    def __call__(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        """query, output [tokens, heads, head_dim], of one prompt after the other; lengths [requests], the first
        `extend_prefix_lens` tokens of a prompt being cached; the rest as for decoding."""
        if encoder_lens is not None or sliding_window_size is not None or not causal:
            raise NotImplementedError("cross attention, sliding windows and encoders have no exact CPU form")
        done = 0
        lengths = zip(req_pool_indices, extend_prefix_lens.tolist(), seq_lens.tolist(), strict=True)
        for row, prefix, length in lengths:
            slots = _slots(req_to_token, row[None], _padded(length))
            slots[:, length:] = _PADDING_SLOT
            keys = self._rooms.gather(0, k_cache, slots).to(query.dtype)
            values = self._rooms.gather(1, v_cache, slots).to(query.dtype)
            for positions in range(_padded(prefix + 1), _padded(length) + 1, _POSITIONS_MULTIPLE):
                start = max(prefix, positions - _POSITIONS_MULTIPLE)
                tokens = min(positions, length) - start
                seen = torch.arange(positions) <= torch.arange(start, start + tokens)[:, None]
                attended = scaled_dot_product_attention(
                    query[done : done + tokens, :, None],
                    keys[:, :, :positions].expand(tokens, -1, -1, -1),
                    values[:, :, :positions].expand(tokens, -1, -1, -1),
                    attn_mask=seen[:, None, None],
                    scale=scaling,
                    enable_gqa=enable_gqa,
                )
                output[done : done + tokens] = attended[:, :, 0]
                done += tokens
        return output


def _padded(length: int) -> int:
    return -(-length // _POSITIONS_MULTIPLE) * _POSITIONS_MULTIPLE


def _slots(req_to_token: torch.Tensor, rows: torch.Tensor, positions: int) -> torch.Tensor:
    """int64 [requests, positions]; the table may be narrower than the last multiple."""
    slots = req_to_token[rows, :positions].long()
    return torch.nn.functional.pad(slots, (0, positions - slots.shape[1]))
