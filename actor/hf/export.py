"""Stream the policy out under Hugging Face names, parameter by parameter, without a full copy on any rank."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from actor.hf.adapter_modules import adapters_by_weight
from actor.hf.tensor_placement import local_parameter, local_parameters, shard_group, table_of
from actor.hf.weight_table import PADDING, Entry, export_plan
from actor.layers.float8_weight import whole
from actor.layers.lora import Lora
from actor.models.policy_model import policy_of
from rlpipe.model.description import TrainableModel

__all__ = ["export_plan", "iter_adapters", "iter_export"]


def iter_export(
    chunks: Sequence[torch.nn.Module],
    model: TrainableModel,
    *,
    everywhere: bool = False,
    with_mtp: bool = False,
    merge: bool = True,
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (Hugging Face name, tensor) in the order of `export_plan`. Collective: all ranks iterate to the end.

    The tensor is complete, in the parameters' dtype and on the device, on global rank 0 (on every rank with
    `everywhere`) and None elsewhere; it may be a view of the live parameter. Only one parameter is gathered at a time.
    merge: a weight with an adapter comes merged with it; its own stays as it is.
    with_mtp: also the trained multi-token-prediction layer, which rollout engines need to draft with, and not else.
    """
    entries = [
        entry for entry in table_of(chunks, model) if entry.copy_of is None and (with_mtp or entry.layer != "mtp")
    ]
    adapters = adapters_by_weight(chunks) if merge else {}
    return _iter_entries(chunks, entries, local_parameters(chunks), adapters, everywhere)


def iter_adapters(
    chunks: Sequence[torch.nn.Module], entries: Sequence[Entry], *, everywhere: bool = False
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """The same for the factors of adapters, under PEFT's names. entries: of `adapter_table`, all of the model's."""
    return _iter_entries(chunks, entries, local_parameters(chunks, adapters=True), {}, everywhere)


@torch.no_grad()
def _iter_entries(
    chunks: Sequence[torch.nn.Module],
    entries: Sequence[Entry],
    parameters: Mapping[tuple[str, bool], torch.nn.Parameter],
    adapters: Mapping[str, Lora],
    everywhere: bool,
) -> Iterator[tuple[str, torch.Tensor | None]]:
    dtype = policy_of(chunks[0]).config.params_dtype
    for entry in entries:
        param = local_parameter(entry, parameters)
        gathered = _gather(entry, param, adapters.get(entry.target), everywhere) if param is not None else None
        gathered = _to_first_stage(entry, gathered, dtype, everywhere)
        tensors = _sources(entry, gathered) if gathered is not None else [None] * len(entry.sources)
        for source, tensor in zip(entry.sources, tensors, strict=True):
            yield source.name, tensor


def _feeds_rank_zero(group: dist.ProcessGroup) -> bool:
    """Whether `group` holds the rank of this pipeline stage that stands where global rank 0 stands in the first."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    counterpart = stage * dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size()
    return counterpart in dist.get_process_group_ranks(group)


def _gather(entry: Entry, param: torch.Tensor, adapter: Lora | None, everywhere: bool) -> torch.Tensor | None:
    """[ranks x local values], flat; None on ranks from which nothing is needed."""
    shard = shard_group(entry)
    if not everywhere and not _feeds_rank_zero(shard.group):
        return None
    weight = whole(param)
    own = (weight if adapter is None else adapter.merged(weight)).contiguous().flatten()
    if entry.split == "replicated" or shard.size == 1:
        return own
    flat = own.new_empty(shard.size * param.numel())
    dist.all_gather_into_tensor(flat, own, group=shard.group)
    return flat


def _to_first_stage(
    entry: Entry, gathered: torch.Tensor | None, dtype: torch.dtype, everywhere: bool
) -> torch.Tensor | None:
    """Bring a gathered entry from its pipeline stage to the first stage, or to all stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return gathered if everywhere or dist.get_rank() == 0 else None
    if not everywhere and 0 not in dist.get_process_group_ranks(group):
        return None
    device = torch.device(torch.cuda.current_device())
    holder = torch.tensor([group.rank() if gathered is not None else -1], device=device)
    dist.all_reduce(holder, op=dist.ReduceOp.MAX, group=group)
    owner = int(holder)
    if owner == 0 and not everywhere:
        return gathered if dist.get_rank() == 0 else None
    if gathered is None:
        gathered = torch.empty(_flat_size(entry), dtype=dtype, device=device)
    dist.broadcast(gathered, dist.get_global_rank(group, owner), group=group)
    return gathered if everywhere or dist.get_rank() == 0 else None


def _flat_size(entry: Entry) -> int:
    along = sum(piece.size for section in entry.sections for piece in section)
    across = 1
    for axis, size in enumerate(entry.sources[0].shape):
        across *= 1 if axis == entry.axis else size
    return along * across


def _sources(entry: Entry, flat: torch.Tensor) -> list[torch.Tensor | None]:
    """Undo `HfCheckpoint.read` for all ranks' shards: scatter every piece back into its source.

    Where sources lie whole and one after another, they are views of `flat`: nothing is copied.
    """
    along = sum(piece.size for section in entry.sections for piece in section)
    size = 1 if entry.split == "replicated" else shard_group(entry).size
    if _lie_in_order(entry, size):
        elements = [math.prod(source.shape) for source in entry.sources]
        parts = flat[: sum(elements)].split(elements)
        return [part.view(source.shape) for part, source in zip(parts, entry.sources, strict=True)]
    shape = list(entry.sources[0].shape)
    shape[entry.axis] = along // size
    outputs = [flat.new_empty(source.shape) for source in entry.sources]
    for rank, local in enumerate(flat.chunk(size)):
        block, position = local.view(shape), 0
        for piece in entry.shard(rank, size):
            if piece.source != PADDING:
                part = block.narrow(entry.axis, position, piece.size)
                outputs[piece.source].narrow(entry.axis, piece.start, piece.size).copy_(part)
            position += piece.size
    return list(outputs)


def _lie_in_order(entry: Entry, size: int) -> bool:
    """Whether all ranks' shards, one after another, are the sources one after another, with at most padding behind."""
    if entry.axis != 0:
        return False
    pieces = [piece for rank in range(size) for piece in entry.shard(rank, size)]
    while pieces and pieces[-1].source == PADDING:
        pieces.pop()
    source, position = 0, 0
    for piece in pieces:
        if position == entry.sources[source].shape[0]:
            source, position = source + 1, 0
        if (piece.source, piece.start) != (source, position):
            return False
        position = piece.stop
    return (source, position) == (len(entry.sources) - 1, entry.sources[-1].shape[0])
