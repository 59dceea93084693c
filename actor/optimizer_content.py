"""What of the optimizer a checkpoint holds: master, moments and nothing else of each trained parameter.

Megatron's own content gathers the states of all data ranks on the first one, in float32 and in three copies: more host
memory than a run has that keeps its states there. Here every rank describes the elements that it holds as boxes of the
whole tensors, under the names of Megatron's own content, and they are written from, and read into, the places where
they lie. A box of any size and offset can be read from any others, so each layout loads what another one saved.

Learning rates and the step are not saved: rates are set before each step, and the step is the number of applied
updates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from operator import mul
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor

from rlpipe.shared.errors import CheckpointError
from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._get_main_param_and_optimizer_states",
    why="it finds the master and the moments of a parameter's elements on this rank",
    drop_when="Megatron saves them without gathering them",
)

_STATES = ("param", "exp_avg", "exp_avg_sq")

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins, and its sizes."""


def optimizer_content(megatron: Any, models: dict[str, Any]) -> list[ShardedTensor]:
    """What this rank holds: shards whose data are views of the states themselves.

    models: sharded tensors of the model chunks, whose places in the whole tensors the states have, too.
    """
    tensors, _ = extract_sharded_tensors_and_factories(models)
    places = {entry.data: entry for entry in nested_values(tensors)}
    return [
        shard
        for part in _trained_parts(megatron)
        for parameter, start in _held(part)
        for name, state in part._get_main_param_and_optimizer_states(parameter).items()
        if name in _STATES
        for shard in _shards(places[parameter], f"optimizer.state.{name}.", state.detach(), start)
    ]


def restore_step(megatron: Any, applied_steps: int) -> None:
    """Count on from `applied_steps`, once the states were read into their places."""
    for part in _trained_parts(megatron):
        for state in part.optimizer.state.values():
            state["step"].fill_(float(applied_steps))
        part.optimizer.forget_uploaded()


def _trained_parts(megatron: Any) -> Iterator[Any]:
    """The dense and the expert half where they train something; another rank may train nothing of a half."""
    for part in megatron.chained_optimizers:
        if part.optimizer is not None:
            yield part


def _held(part: Any) -> Iterator[tuple[torch.nn.Parameter, int]]:
    """Each parameter of which this rank holds elements, and the first of them in the flattened parameter."""
    for buffer in part.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start


def _shards(
    place: ShardedTensor | ShardedTensorFactory, prefix: str, state: Tensor, start: int
) -> Iterator[ShardedTensor]:
    """state: [n], the elements from `start` on of a parameter that lies at `place`."""
    whole = torch.empty(place.data.shape, dtype=state.dtype)  # never filled: its pieces tell where they lie
    changes = {"key": prefix + place.key, "data": whole}
    if isinstance(place, ShardedTensorFactory):
        pieces = list(nested_values(replace(place, **changes).build()))
    else:
        pieces = [replace(place, **changes, dtype=state.dtype)]
    for piece in pieces:
        view = piece.data
        if _memory(view) != _memory(whole) or list(view.stride()) != sorted(view.stride(), reverse=True):
            raise CheckpointError(
                f"{piece.key} is no part of its parameter in the same order: save it as its own tensor"
            )
        first, last = (
            elements_below(view.shape, view.stride(), bound - view.storage_offset())
            for bound in (start, start + state.numel())
        )
        for begins, sizes in boxes(view.shape, first, last):
            at = view.storage_offset() + sum(map(mul, begins, view.stride()))
            yield _shard(piece, begins, state.as_strided(sizes, view.stride(), state.storage_offset() + at - start))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _shard(piece: ShardedTensor, begins: Sequence[int], data: Tensor) -> ShardedTensor:
    """Every data rank saves what it holds, so that of its kind each is the first."""
    added = piece.prepend_axis_num
    offsets = [own + more for own, more in zip(piece.global_offset, [0] * added + list(begins), strict=True)]
    data = data[(None,) * added]
    return ShardedTensor(
        key=piece.key,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=piece.global_shape,
        global_offset=tuple(offsets),
        axis_fragmentations=None,
        replica_id=(*piece.replica_id[:2], 0),
        allow_shape_mismatch=piece.allow_shape_mismatch,
    )


def elements_below(shape: Sequence[int], strides: Sequence[int], bound: int) -> int:
    """How many elements of a view lie before `bound`, where they lie in the order of their indices."""
    if bound <= 0:
        return 0
    if not shape:
        return 1
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape[1:], strides[1:], strict=True))
    whole = min(shape[0], max(0, (bound - extent) // strides[0] + 1))
    rest = elements_below(shape[1:], strides[1:], bound - whole * strides[0]) if whole < shape[0] else 0
    return whole * prod(shape[1:]) + rest


def boxes(shape: Sequence[int], first: int, last: int) -> list[Box]:
    """The fewest boxes of a tensor of `shape` with its elements `first` to `last` - 1, counted in order."""
    if first >= last:
        return []
    if not shape:
        return [((), ())]
    row = prod(shape[1:])
    (top, left), (bottom, right) = divmod(first, row), divmod(last, row)
    if top == bottom:
        return _in_row(top, boxes(shape[1:], left, right))
    found = []
    if left:
        found += _in_row(top, boxes(shape[1:], left, row))
        top += 1
    if top < bottom:
        found.append(((top, *(0 for _ in shape[1:])), (bottom - top, *shape[1:])))
    return found + _in_row(bottom, boxes(shape[1:], 0, right))


def _in_row(row: int, found: list[Box]) -> list[Box]:
    return [((row, *begins), (1, *sizes)) for begins, sizes in found]
