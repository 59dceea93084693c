"""A `Pack` on the device: this context-parallel rank's tokens, and the host-side lengths that every layer needs.

Context parallelism cuts each (padded) sequence into 2 x CP pieces; rank r holds pieces r and 2 x CP - 1 - r, so that
causal attention costs every rank the same. All index arithmetic happens here, on the host, once per pack.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray

from rlpipe.shared.errors import ActorError
from rlpipe.shared.pack import Pack
from rlpipe.shared.pack_multiples import sequence_multiple

Rows = NDArray[np.int64]


def zigzag_rows(cu_seqlens: tuple[int, ...], cp_size: int, cp_rank: int) -> Rows:
    """Rows of the whole pack that `cp_rank` holds, in its order."""
    if cp_size == 1:
        return np.arange(cu_seqlens[-1], dtype=np.int64)
    rows = []
    for start, end in zip(cu_seqlens, cu_seqlens[1:], strict=False):
        piece = (end - start) // (2 * cp_size)
        rows.append(np.arange(start + cp_rank * piece, start + (cp_rank + 1) * piece, dtype=np.int64))
        rows.append(np.arange(end - (cp_rank + 1) * piece, end - cp_rank * piece, dtype=np.int64))
    return np.concatenate(rows)


@dataclass
class PackedSequences(PackedSeqParams):
    """Sequence ends of one pack, as host integers; index tensors are made on first use and kept for all layers.

    `ends` are the padded ends of the WHOLE pack ([n + 1], starts with 0), also under context parallelism. `routes`:
    int16 [tokens that this rank's experts layers see, layers, experts per token], where routing is replayed. It travels
    through Megatron's `packed_seq_params` argument.
    """

    ends: tuple[int, ...] = ()
    cp_size: int = 1
    cp_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    routes: torch.Tensor | None = None

    def _tensor(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype).to(self.device, non_blocking=True)

    @property
    def total_tokens(self) -> int:
        return self.ends[-1]

    @property
    def longest_tokens(self) -> int:
        return max(end - start for start, end in zip(self.ends, self.ends[1:], strict=False))

    @cached_property
    def ends_tensor(self) -> torch.Tensor:
        """int32 [n + 1] on the device: always this same tensor, because kernels cache by its identity."""
        return self._tensor(self.ends, torch.int32)

    @cached_property
    def ends_tensor_host(self) -> torch.Tensor:
        """int32 [n + 1] on the CPU."""
        return torch.tensor(self.ends, dtype=torch.int32)

    @cached_property
    def places(self) -> torch.Tensor:
        """int32 [T] on the device: the index of each of the pack's tokens within its sequence."""
        lengths = np.diff(np.asarray(self.ends))
        return self._tensor(np.arange(self.total_tokens) - np.repeat(self.ends[:-1], lengths), torch.int32)

    @cached_property
    def to_global(self) -> torch.Tensor:
        """int64 [T]: picks the pack's order out of the ranks' shards laid one after another."""
        shards = [zigzag_rows(self.ends, self.cp_size, rank) for rank in range(self.cp_size)]
        return self._tensor(np.argsort(np.concatenate(shards), kind="stable"), torch.int64)

    @cached_property
    def from_global(self) -> torch.Tensor:
        """int64 [T]: the inverse of `to_global`."""
        shards = [zigzag_rows(self.ends, self.cp_size, rank) for rank in range(self.cp_size)]
        return self._tensor(np.concatenate(shards), torch.int64)

    @cached_property
    def prefixes(self) -> "PiecePrefixes":
        """What this rank's pieces attend to under context parallelism."""
        return piece_prefixes(self)


@dataclass(frozen=True)
class PiecePrefixes:
    """Two pieces per sequence: query ends, key ends (host and device) and the key rows of the whole pack."""

    query_ends: tuple[int, ...]
    key_ends: tuple[int, ...]
    query_ends_tensor: torch.Tensor
    key_ends_tensor: torch.Tensor
    key_rows: torch.Tensor


def piece_prefixes(sequences: PackedSequences) -> PiecePrefixes:
    """Each piece attends to its sequence up to the piece's own end."""
    query_ends, key_ends, rows = [0], [0], []
    size, rank = sequences.cp_size, sequences.cp_rank
    for start, end in zip(sequences.ends, sequences.ends[1:], strict=False):
        piece = (end - start) // (2 * size)
        for stop in (start + (rank + 1) * piece, end - rank * piece):
            rows.append(np.arange(start, stop, dtype=np.int64))
            query_ends.append(query_ends[-1] + piece)
            key_ends.append(key_ends[-1] + stop - start)
    return PiecePrefixes(
        query_ends=tuple(query_ends),
        key_ends=tuple(key_ends),
        query_ends_tensor=sequences._tensor(query_ends, torch.int32),
        key_ends_tensor=sequences._tensor(key_ends, torch.int32),
        key_rows=sequences._tensor(np.concatenate(rows), torch.int64),
    )


@dataclass(frozen=True)
class PackInputs:
    """This rank's `t` tokens of a pack. token_ids, position_ids, targets: int64 [t] on the device.

    rows: int64 [t] on the host, the rows of the pack that these are; rows at or after `pack_tokens` are filling of a
    dummy pack. next_targets, next_weights: targets and loss weights (float32) of the following position of the same
    sequence, 0 at its end; what multi-token prediction learns.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    next_targets: torch.Tensor
    next_weights: torch.Tensor
    sequences: PackedSequences
    rows: Rows
    pack_tokens: int

    def take(self, values: NDArray[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The rows of a per-token array [T] of the same pack, on the device; 0 in the filling of a dummy pack."""
        padded = np.zeros(self.sequences.total_tokens, dtype=values.dtype)
        padded[: self.pack_tokens] = values
        return _to_device(padded[self.rows], self.sequences.device, dtype)


def pack_to_device(pack: Pack, device: torch.device | str = "cpu") -> PackInputs:
    """Copy this context-parallel rank's part of `pack` to the device; an empty pack becomes the smallest legal one.

    The rank and the sizes are those of the initialised Megatron process groups.

    Raises:
        ActorError: a sequence is not padded to a multiple of 2 x CP.
    """
    from megatron.core import parallel_state

    cp_size = parallel_state.get_context_parallel_world_size()
    cp_rank = parallel_state.get_context_parallel_rank()
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    ends = _legal_ends(pack, cp_size, tp_size)
    total = ends[-1]
    device = torch.device(device)
    rows = zigzag_rows(ends, cp_size, cp_rank)
    sequences = PackedSequences(
        qkv_format="thd",
        ends=ends,
        cp_size=cp_size,
        cp_rank=cp_rank,
        device=device,
        routes=_local_routes(pack, rows, total, tp_size, device),
    )

    def local(values: NDArray[Any]) -> torch.Tensor:
        filled = np.zeros(total, dtype=values.dtype)
        filled[: len(values)] = values
        return _to_device(filled[rows], device, None)

    return PackInputs(
        token_ids=local(pack.token_ids),
        position_ids=local(pack.position_ids),
        targets=local(pack.targets),
        next_targets=local(_shift_left(pack.targets, pack.cu_seqlens_padded)),
        next_weights=local(_shift_left(pack.loss_weights, pack.cu_seqlens_padded)),
        sequences=sequences,
        rows=rows,
        pack_tokens=len(pack.token_ids),
    )


def _local_routes(pack: Pack, rows: Rows, total: int, tp_size: int, device: torch.device) -> torch.Tensor | None:
    """Of the tokens that this rank routes: under tensor parallelism each rank routes its part of the sequence."""
    from megatron.core import parallel_state

    if pack.routes is None:
        return None
    layers, per_token = pack.routes.shape[1:]
    filled = np.tile(np.arange(per_token, dtype=np.int16), (total, layers, 1))
    filled[: len(pack.routes)] = pack.routes
    shard = np.split(filled[rows], tp_size)[parallel_state.get_tensor_model_parallel_rank()]
    return _to_device(shard, device, None)


def _legal_ends(pack: Pack, cp_size: int, tp_size: int) -> tuple[int, ...]:
    multiple = sequence_multiple(cp_size)
    if pack.padded_tokens == 0:
        return (0, multiple * tp_size)
    lengths = np.diff(np.asarray(pack.cu_seqlens_padded))
    if (lengths % multiple).any():
        raise ActorError(
            f"a padded sequence of {int(lengths[lengths % multiple != 0][0])} tokens is not a multiple of "
            f"2 x CP = {multiple}: pad sequences to it"
        )
    return tuple(pack.cu_seqlens_padded)


def _shift_left(values: NDArray[Any], ends: tuple[int, ...]) -> NDArray[Any]:
    shifted = np.zeros_like(values)
    if len(values) == 0:
        return shifted
    shifted[:-1] = values[1:]
    shifted[np.asarray(ends[1:], dtype=np.int64) - 1] = 0
    return shifted


def _to_device(values: NDArray[Any], device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device=device, dtype=dtype, non_blocking=True)
