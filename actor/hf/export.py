"""Stream the policy out under Hugging Face names, parameter by parameter, without a full copy on any rank."""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from actor.hf.adapter_modules import adapters_by_weight
from actor.hf.tensor_placement import local_parameter, local_parameters, shard_group, table_of
from actor.hf.weight_table import PADDING, Entry, export_plan
from actor.layers.float8_weight import whole
from actor.models.policy_model import policy_of
from rlpipe.model.description import TrainableModel

__all__ = ["Gatherer", "export_plan", "exported_entries", "iter_export"]


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
    gather = Gatherer(chunks, merge=merge)
    for entry in exported_entries(chunks, model, with_mtp=with_mtp):
        tensors = gather.everywhere(entry) if everywhere else gather.at_rank_zero(entry)
        yield from zip((source.name for source in entry.sources), tensors, strict=True)


def exported_entries(chunks: Sequence[torch.nn.Module], model: TrainableModel, *, with_mtp: bool) -> tuple[Entry, ...]:
    """The parameters that are exported, in order."""
    table = table_of(chunks, model)
    return tuple(entry for entry in table if entry.copy_of is None and (with_mtp or entry.layer != "mtp"))


class Gatherer:
    """Brings the Hugging Face tensors of an entry together where they are wanted, each complete, in the parameters'
    dtype and on the device; None where they are not. They may be views of the live parameter.

    merge: a weight with an adapter comes merged with it.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], *, merge: bool = True) -> None:
        self._dtype = policy_of(chunks[0]).config.params_dtype
        self._parameters = local_parameters(chunks) | local_parameters(chunks, adapters=True)
        self._adapters = adapters_by_weight(chunks) if merge else {}

    @torch.no_grad()
    def everywhere(self, entry: Entry) -> list[torch.Tensor | None]:
        """On all processes, all of which have to call this."""
        return self._over_stages(entry, None)

    @torch.no_grad()
    def at_rank_zero(self, entry: Entry) -> list[torch.Tensor | None]:
        """On global rank 0. All processes have to call this."""
        return self._over_stages(entry, 0)

    @torch.no_grad()
    def at_holder(self, entry: Entry, rank: int) -> list[torch.Tensor | None]:
        """On the process of global rank `rank`, which holds a shard of the entry. All over which it is cut have to
        call this."""
        flat = self._gathered(entry, rank)
        return _nothing(entry) if flat is None else _sources(entry, flat)

    @torch.no_grad()
    def held_experts(self, entry: Entry) -> tuple[int, torch.Tensor]:
        """Number of the first expert that this process holds, and of all of them [experts, rows, columns]."""
        values = self._values(entry)
        assert values is not None
        experts, *expert = entry.sources[0].shape
        shard = shard_group(entry)
        return shard.rank * experts // shard.size, values.view(experts // shard.size, *expert)

    def _values(self, entry: Entry) -> torch.Tensor | None:
        """This rank's shard; None where another pipeline stage has it."""
        param = local_parameter(entry, self._parameters)
        if param is None:
            return None
        weight, adapter = whole(param), self._adapters.get(entry.target)
        return weight if adapter is None else adapter.merged(weight)

    def _over_stages(self, entry: Entry, rank: int | None) -> list[torch.Tensor | None]:
        gathered = self._gathered(entry, None if rank is None else _counterpart(rank))
        flat = _to_stage(entry, gathered, self._dtype, rank)
        return _nothing(entry) if flat is None else _sources(entry, flat)

    def _gathered(self, entry: Entry, rank: int | None) -> torch.Tensor | None:
        """[ranks x local values], flat, on global rank `rank` if the entry is cut over it, or on all ranks over which
        it is cut; None elsewhere, and where another pipeline stage has it."""
        shard = shard_group(entry)
        if rank is not None and rank not in dist.get_process_group_ranks(shard.group):
            return None
        values = self._values(entry)
        if values is None:
            return None
        own, is_wanted = values.contiguous().flatten(), rank in (None, dist.get_rank())
        if entry.split == "replicated" or shard.size == 1:
            return own if is_wanted else None
        flat = own.new_empty(shard.size * own.numel()) if is_wanted else None
        if flat is not None and rank is None:
            dist.all_gather_into_tensor(flat, own, group=shard.group)
        else:
            parts = None if flat is None else list(flat.chunk(shard.size))
            dist.gather(own, parts, dst=rank, group=shard.group)
        return flat


def _nothing(entry: Entry) -> list[torch.Tensor | None]:
    return [None] * len(entry.sources)


def _counterpart(rank: int) -> int:
    """The rank of this pipeline stage that stands where global rank `rank` stands in its own."""
    stage_size = dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size()
    return parallel_state.get_pipeline_model_parallel_rank() * stage_size + rank % stage_size


def _to_stage(entry: Entry, gathered: torch.Tensor | None, dtype: torch.dtype, rank: int | None) -> torch.Tensor | None:
    """Bring a gathered entry from its pipeline stage to global rank `rank`, or to all stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return gathered
    ranks = dist.get_process_group_ranks(group)
    if rank is not None and rank not in ranks:
        return None
    device = torch.device(torch.cuda.current_device())
    holder = torch.tensor([group.rank() if gathered is not None else -1], device=device)
    dist.all_reduce(holder, op=dist.ReduceOp.MAX, group=group)
    owner = ranks[int(holder)]
    if owner != rank:
        if gathered is None:
            gathered = torch.empty(_flat_size(entry), dtype=dtype, device=device)
        dist.broadcast(gathered, owner, group=group)
    return gathered if rank in (None, dist.get_rank()) else None


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
