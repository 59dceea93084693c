"""Causal attention of packed sequences, by the kernel that is fastest for each length.

On a GPU, in half precision: FlashAttention 2 takes a whole pack at once, whatever its lengths. cuDNN takes sequences of
one length at a time, and on Hopper passes a long one faster (`benchmarks/attention.py`), so long sequences, and long
pieces of them, go to it one by one where heads have a width at which tests compare it with float32. Everywhere else
torch's own kernels run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F

from actor.layers.cudnn_attention import CuDnn, Cut, Inputs, Part, long_parts, rounded_length
from rlpipe.estimate.gpu_generations import LONG_SEQUENCE_TOKENS
from rlpipe.jit_monitor import host_integer, refuse_recompiling_flash_attention

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_CUDNN_CAPABILITY = (9, 0)  # measured on Hopper only; older GPUs keep FlashAttention 2
_CUDNN_CHANNELS = (64, 128, 256)
"""Widths of heads at which tests/gpu/test_attention_gpu.py compares it with float32: cuDNN has an open report of
silently wrong attention on another GPU (pytorch/pytorch issue 193893)."""


@dataclass(frozen=True)
class Segments:
    """Where segments of rows end: [n + 1], starts with 0. on_device: the same as int32 on the rows' device."""

    ends: tuple[int, ...]
    on_device: torch.Tensor

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in pairwise(self.ends)]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def part(self, first: int, last: int) -> "Segments":
        """Segments from `first` up to, without, `last`, for their rows alone."""
        ends = tuple(end - self.ends[first] for end in self.ends[first : last + 1])
        return Segments(ends, self.on_device[first : last + 1] - self.on_device[first])


def check_flash_attention() -> None:
    """ActorError where packed attention would run on a FlashAttention-4 that compiles without end."""
    chosen = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    if chosen == "FA4":
        refuse_recompiling_flash_attention()


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, queries: Segments, keys: Segments, scale: float
) -> torch.Tensor:
    """Attention of segment i of the queries to segment i of the keys; the last query sees the last key (bottom right).

    query: [t, heads, d]; key, value: [s, kv_heads, d], heads a multiple of kv_heads; returns [t, heads, d].
    """
    if query.is_cuda and query.dtype in _FLASH_DTYPES:
        if queries.longest >= LONG_SEQUENCE_TOKENS and _cudnn_runs(query, key, value):
            return _long_ones_apart(query, key, value, queries, keys, scale)
        return packed_flash(query, key, value, queries, keys, scale)
    if queries.ends == keys.ends:
        return _causal_in_batches(query, key, value, queries, scale)
    # Not slices: the backward of n slices writes n whole gradients, the one of a split a single one.
    segments = zip(query.split(queries.lengths), key.split(keys.lengths), value.split(keys.lengths), strict=True)
    return torch.cat([_bottom_right_causal(q, k, v, scale) for q, k, v in segments])


def _cudnn_runs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch would let cuDNN attend to a sequence of these heads; it refuses under deterministic algorithms."""
    if query.shape[-1] not in _CUDNN_CHANNELS or torch.cuda.get_device_capability(query.device) < _CUDNN_CAPABILITY:
        return False
    q, k, v = (x[:LONG_SEQUENCE_TOKENS].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, True)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


def _long_ones_apart(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, queries: Segments, keys: Segments, scale: float
) -> torch.Tensor:
    runs = segment_runs(queries.ends)
    rows, seen = ([slice(one.ends[first], one.ends[last]) for first, last in runs] for one in (queries, keys))
    own, sees = ([run.stop - run.start for run in of] for of in (rows, seen))
    long = [
        last - first == 1 and tokens >= LONG_SEQUENCE_TOKENS for (first, last), tokens in zip(runs, own, strict=True)
    ]
    parts = [Part(rows[run], seen[run]) for run, is_long in enumerate(long) if is_long]
    short = [run for run, is_long in enumerate(long) if not is_long and own[run]]
    if not short:
        return long_parts(query, key, value, parts, [], scale)
    # Not slices, as above.
    split = list(zip(query.split(own), key.split(sees), value.split(sees), strict=True))
    others = []
    for run in short:
        segments = queries.part(*runs[run]), keys.part(*runs[run])
        others.append((rows[run], packed_flash(*split[run], *segments, scale)))
    return long_parts(query, key, value, parts, others, scale)


def segment_runs(ends: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first segment, one after the last) of each long segment, and of each stretch of short ones between them."""
    kinds = [
        segment if end - start >= LONG_SEQUENCE_TOKENS else -1 for segment, (start, end) in enumerate(pairwise(ends))
    ]
    runs, first = [], 0
    for _, members in groupby(kinds):
        runs.append((first, first + len(list(members))))
        first = runs[-1][1]
    return runs


def long_lengths(longest_tokens: int) -> list[int]:
    """Every length, filling included, at which cuDNN meets sequences of at most `longest_tokens`."""
    lengths = [rounded_length(LONG_SEQUENCE_TOKENS)]
    while lengths[-1] < longest_tokens:
        lengths.append(rounded_length(lengths[-1] + 1))
    return lengths if longest_tokens >= LONG_SEQUENCE_TOKENS else []


@dataclass(frozen=True)
class LongShapes:
    """What cuDNN meets. squares: lengths of as many queries as keys. rectangles: of queries, and of keys before."""

    squares: tuple[int, ...]
    rectangles: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, longest_tokens: int, context_parallel: int, rank: int) -> "LongShapes":
        """Of sequences of at most `longest_tokens`, or the two pieces of each that context-parallel rank `rank` has."""
        if context_parallel == 1:
            return cls(tuple(long_lengths(longest_tokens)))
        squares, rectangles = set(), set()
        for tokens in range(LONG_SEQUENCE_TOKENS, -(-longest_tokens // (2 * context_parallel)) + 1):
            for earlier in (rank, 2 * context_parallel - 1 - rank):
                cut = Cut.of(tokens, (earlier + 1) * tokens)
                squares.add(rounded_length(cut.overlap + tokens))
                if cut.before:
                    rectangles.add((rounded_length(tokens), cut.before))
        return cls(tuple(sorted(squares)), tuple(sorted(rectangles)))

    @property
    def cases(self) -> list[tuple[int, int, bool]]:
        """Queries, keys, and whether it is causal."""
        squares = [(length, length, True) for length in self.squares]
        return squares + [(queries, before, False) for queries, before in self.rectangles]


@dataclass(frozen=True)
class Heads:
    """Of one rank, and their width."""

    queries: int
    key_values: int
    channels: int
    dtype: torch.dtype

    @classmethod
    def of_rank(cls, heads: int, key_values: int, channels: int, tensor_parallel: int, dtype: torch.dtype) -> "Heads":
        """heads, key_values: of all ranks."""
        return cls(heads // tensor_parallel, max(1, key_values // tensor_parallel), channels, dtype)

    def planning_bytes(self, tokens: int) -> int:
        """What planning for as many queries and keys takes: inputs, result and their gradients, and float32 sums of the
        queries' gradients."""
        rows = 4 * self.queries + 4 * self.key_values
        return tokens * self.channels * (rows * self.dtype.itemsize + self.queries * torch.float32.itemsize)


def plan_long_sequences(heads: Heads, shapes: LongShapes, device: torch.device, recomputes: bool) -> int:
    """Let cuDNN plan its kernels for `shapes` now, which takes a tenth of a second each, rather than in a step.

    Plans serve the thread that asked for them: forward passes run on this one, backward passes on autograd's, and there
    forward passes once more where it `recomputes` layers. Returns the number of shapes: 0 where cuDNN does not run.
    """
    if device.type != "cuda" or heads.dtype not in _FLASH_DTYPES or not shapes.cases:
        return 0
    if not _cudnn_runs(*_zero_inputs(heads, *shapes.cases[0][:2], device)):
        return 0
    kernel = CuDnn()

    def plan(*steps: Callable[..., None]) -> None:
        for queries, keys, is_causal in shapes.cases:
            inputs = _zero_inputs(heads, queries, keys, device)
            for step in steps:
                step(*inputs, is_causal)

    plan(kernel.plan)
    on_backward_thread(device, lambda: plan(*([kernel.plan] if recomputes else []), kernel.plan_backward))
    return len(shapes.cases)


def _zero_inputs(heads: Heads, queries: int, keys: int, device: torch.device) -> Inputs:
    sizes = (queries, heads.queries), (keys, heads.key_values), (keys, heads.key_values)
    query, key, value = (torch.zeros(*size, heads.channels, dtype=heads.dtype, device=device) for size in sizes)
    return query, key, value


def on_backward_thread(device: torch.device, work: Callable[[], None]) -> None:
    """Runs `work`, without gradients, on the thread on which autograd runs backward passes of `device`."""
    with torch.enable_grad():
        anchor = torch.zeros((), device=device, requires_grad=True)
        _WorkInBackward.apply(anchor, work).backward()


class _WorkInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, work: Callable[[], None]) -> torch.Tensor:
        ctx.work = work
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.work()
        return None, None


def packed_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, queries: Segments, keys: Segments, scale: float
) -> torch.Tensor:
    """FlashAttention of all segments at once, with shapes as in `causal_attention`."""
    import torch.nn.attention.varlen as varlen

    varlen_attn: Any = varlen.varlen_attn
    longest = (host_integer("max_seqlen_q", queries.longest), host_integer("max_seqlen_k", keys.longest))
    options: Any = _grouped_heads_option(varlen_attn) if query.shape[1] != key.shape[1] else {}
    ends = (queries.on_device, keys.on_device)
    return varlen_attn(query, key, value, *ends, *longest, scale=scale, window_size=(-1, 0), **options)


def _grouped_heads_option(varlen_attn: Any) -> dict[str, bool]:
    """torch 2.11 takes fewer key/value heads as they are; from 2.12 on it wants to be told."""
    import inspect

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _causal_in_batches(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """Self-attention without a packed kernel: segments of like length, padded at the right, are one batch.

    Right padding needs no mask under causal attention, as only the padding's own rows see it. One call for each
    segment would be ten times slower at a hundred short segments a pack.
    """
    lengths = segments.lengths
    buckets: dict[int, list[int]] = {}
    for segment, length in enumerate(lengths):
        if length:
            buckets.setdefault(length.bit_length(), []).append(segment)
    outputs, rows_of_outputs = [], []
    for members in buckets.values():
        longest = max(lengths[segment] for segment in members)
        starts = torch.tensor([segments.ends[segment] for segment in members], device=query.device)
        sizes = torch.tensor([lengths[segment] for segment in members], device=query.device)
        offsets = torch.arange(longest, device=query.device)
        real = offsets < sizes[:, None]
        rows = torch.where(real, starts[:, None] + offsets, 0)
        places = real.flatten().nonzero()[:, 0]
        q, k, v = (_Padded.apply(x, rows, places).transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        rows_of_outputs.append((rows[real], places))
    return _Joined.apply(rows_of_outputs, *outputs)


class _Padded(torch.autograd.Function):
    """Rows of `x` [t, heads, d] at `rows` [segments, longest]. `places`: of its elements that are no padding, which has
    no gradient. Whole rows are copied in both directions; the gradient of an index adds up element by element."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows.flatten()[places], places)
        ctx.shape = x.shape
        return x.index_select(0, rows.flatten()).unflatten(0, rows.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rows, places = ctx.saved_tensors
        real = gradients[0].flatten(0, 1).index_select(0, places)
        return real.new_zeros(ctx.shape).index_copy_(0, rows, real), None, None


class _Joined(torch.autograd.Function):
    """The padded `outputs` [rows, heads, d] of all batches as the rows of a pack, each but for its padding: for each
    batch its rows of the pack, and which of its own they are."""

    @staticmethod
    def forward(ctx: Any, rows: list[tuple[torch.Tensor, torch.Tensor]], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.rows, ctx.sizes = rows, [len(out) for out in outputs]
        whole = outputs[0].new_empty(sum(len(pack) for pack, _ in rows), *outputs[0].shape[1:])
        for (of_pack, own), out in zip(rows, outputs, strict=True):
            whole.index_copy_(0, of_pack, out.index_select(0, own))
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        whole = gradients[0]
        parts = (
            whole.new_zeros(size, *whole.shape[1:]).index_copy_(0, own, whole.index_select(0, of_pack))
            for (of_pack, own), size in zip(ctx.rows, ctx.sizes, strict=True)
        )
        return None, *parts


def _bottom_right_causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    queries, keys = query.shape[0], key.shape[0]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
