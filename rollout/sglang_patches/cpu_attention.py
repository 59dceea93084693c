"""Attention of a CPU engine: a token's answer is the same whether it was decoded, or read as part of a prompt.

So it does not matter which part of a prompt was in the cache: keys and values have the bits that they have without it.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

_SHORT_MULTIPLE, _SHORT_POSITIONS = 16, 128
_POSITIONS_MULTIPLE = 32
"""What lengths are padded to: of short ones padding would be a large part, long ones would be many small batches."""

_PADDING_SLOT = 0  # SGLang keeps it free for writes that nobody reads
_ROOM_BYTES = 4 * 2**20


class PagedAttention:
    """Query tokens against their own requests' keys and values in the cache.

    `decode` and `extend` stand for `TorchNativeAttnBackend._run_sdpa_forward_decode` and `_run_sdpa_forward_extend` and
    take their arguments, but for the backend. All layers of one pass have the same requests: call `begin_pass` before
    the first.

    Each token has a padded length, which follows from its own place alone, and the kernel computes each by itself, so
    the answer depends neither on the other tokens nor on how many of them are computed at a time. Tokens of one padded
    length are one batch. The heads that share keys are rows of one product, which reads the keys once.

    Keys and values are gathered for as many requests at a time as fit into 4 MiB: what is small is still in the
    processor's cache when it is read.
    """

    def __init__(self) -> None:
        self._rooms = _Rooms()
        self._parts: list[_Part] | None = None

    def begin_pass(self) -> None:
        self._parts = None

    def decode(
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
        """query, output [requests, heads, head_dim], of each request's last token; caches [slots, key_value_heads,
        head_dim]; `req_to_token` [pool rows, positions] holds each request's cache slots."""
        if encoder_lens is not None or sliding_window_size is not None:
            raise NotImplementedError("cross attention and sliding windows have no fast CPU form")
        if self._parts is None:
            requests = _Requests(req_to_token, req_pool_indices, (seq_lens - 1).tolist(), seq_lens.tolist())
            self._parts = list(requests.parts(k_cache[0].nbytes))
        return self._attend(query, output, k_cache, v_cache, scaling)

    def extend(
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
        if self._parts is None:
            requests = _Requests(req_to_token, req_pool_indices, extend_prefix_lens.tolist(), seq_lens.tolist())
            self._parts = list(requests.parts(k_cache[0].nbytes))
        return self._attend(query, output, k_cache, v_cache, scaling)

    def _attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        groups = k_cache.shape[1]
        for part in self._parts or ():
            attended = scaled_dot_product_attention(
                part.queries(query, groups),
                self._rooms.gather(0, k_cache, part.slots).to(query.dtype),
                self._rooms.gather(1, v_cache, part.slots).to(query.dtype),
                attn_mask=part.mask(groups, query.dtype),
                scale=scaling,
                enable_gqa=part.tokens > 1,
            )
            part.write(attended, output, groups)
        return output


@dataclass
class _Part:
    """As many tokens of each of some requests, all of one padded length.

    rows: of the queries, requests x tokens. slots: int64 [requests, positions]. places: int64 [requests, tokens], the
    position of each token.
    """

    rows: slice | torch.Tensor
    slots: torch.Tensor
    places: torch.Tensor
    _mask: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.places.shape[1]

    def queries(self, query: torch.Tensor, groups: int) -> torch.Tensor:
        """[requests, groups x tokens, heads of a group, head_dim]: tokens that share keys are heads that do."""
        mine = query[self.rows].unflatten(1, (groups, -1))
        if self.tokens == 1:
            return mine
        return mine.unflatten(0, self.places.shape).transpose(1, 2).flatten(1, 2)

    def mask(self, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """What is added to scores, [requests, 1 or groups x tokens, 1, positions]. Kept where it is small."""
        if self._mask is not None:
            return self._mask
        seen = torch.arange(self.slots.shape[1]) <= self.places[..., None]
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
        if self.tokens > 1:
            return mask.repeat(1, groups, 1)[:, :, None]
        self._mask = mask[:, :, None]
        return self._mask

    def write(self, attended: torch.Tensor, output: torch.Tensor, groups: int) -> None:
        """attended: [requests, groups x tokens, heads of a group, head_dim]."""
        if self.tokens > 1:
            attended = attended.unflatten(1, (groups, -1)).transpose(1, 2).flatten(0, 1)
        output[self.rows] = attended.flatten(1, 2)


@dataclass(frozen=True)
class _Requests:
    """Of one pass: tokens from `prefixes` to `lengths` of each request are computed."""

    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    prefixes: list[int]
    lengths: list[int]

    def parts(self, slot_bytes: int) -> Iterator[_Part]:
        """slot_bytes: of one position's keys."""
        lengths = torch.tensor(self.lengths)
        for (positions, tokens), found in self._blocks().items():
            at_once = max(1, _ROOM_BYTES // (positions * slot_bytes))
            for members in torch.tensor(found).split(at_once):
                request, row, start = members.T
                rows, places = (first[:, None] + torch.arange(tokens) for first in (row, start))
                slots = self.req_to_token[self.req_pool_indices[request], :positions].long()
                slots = torch.nn.functional.pad(slots, (0, positions - slots.shape[1]))  # the table may be narrower
                real = torch.arange(positions) < lengths[request, None]
                yield _Part(_as_slice(rows.flatten()), slots.where(real, _PADDING_SLOT), places)

    def _blocks(self) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
        """By padded length and number of tokens: each request that has such a block, its first row and position."""
        blocks = defaultdict(list)
        row = 0
        for request, (prefix, length) in enumerate(zip(self.prefixes, self.lengths, strict=True)):
            start = prefix
            while start < length:
                positions = _padded(start + 1)
                tokens = min(positions, length) - start
                blocks[positions, tokens].append((request, row, start))
                row, start = row + tokens, start + tokens
        return blocks


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


def _padded(length: int) -> int:
    multiple = _SHORT_MULTIPLE if length <= _SHORT_POSITIONS else _POSITIONS_MULTIPLE
    return -(-length // multiple) * multiple


def _as_slice(rows: torch.Tensor) -> slice | torch.Tensor:
    """The same rows; those that follow each other need not be copied."""
    first, count = int(rows[0]), len(rows)
    return slice(first, first + count) if torch.equal(rows, torch.arange(first, first + count)) else rows
