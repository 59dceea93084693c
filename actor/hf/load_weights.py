"""Load Hugging Face weights into the built chunks: every rank reads only what it holds, and no replica twice."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from actor.hf.safetensors_reader import HfCheckpoint, fill_shard, unloaded_prefixes
from actor.hf.tensor_placement import has_mtp, local_parameter, local_parameters, shard_group, table_of
from actor.hf.weight_table import Entry
from rlpipe.model.description import TrainableModel
from rlpipe.model.weight_checks import all_finite, check_finite, check_tied_head
from rlpipe.shared.errors import ModelError


@dataclass(frozen=True)
class LoadReport:
    """What this rank did. `unused_tensors`: names in the files that the built model has no place for."""

    bytes_read: int
    parameters: int
    seconds: float
    unused_tensors: tuple[str, ...]


def load_hf(chunks: Sequence[torch.nn.Module], model: TrainableModel, model_dir: str | Path) -> LoadReport:
    """Fill all parameters from a Hugging Face folder. Collective: all ranks call it with chunks of one model.

    Names and shapes of the WHOLE model are checked on every rank first, so a bad folder fails everywhere alike and
    leaves the weights untouched. Of the ranks that hold the same shard one reads it and broadcasts it, so all ranks
    together read each tensor about once (replicated norms and routers once per tensor-parallel rank).

    Raises:
        ModelError: a tensor is missing, unknown, of another shape or not finite, or a file is damaged.
    """
    started = time.monotonic()
    with HfCheckpoint(model_dir) as files:
        entries = table_of(chunks, files.as_stored(model))
        unused = files.check(entries, unloaded_prefixes(model, has_mtp(chunks)))
        check_tied_head(model, files.model_dir)
        parameters = local_parameters(chunks)
        mine = [(entry, param) for entry in entries if (param := local_parameter(entry, parameters)) is not None]
        if len(mine) != len(parameters):
            known = {id(param) for _, param in mine}
            names = [name for (name, _), param in parameters.items() if id(param) not in known]
            raise ModelError(f"no Hugging Face tensor is known for the parameters {', '.join(sorted(names))}")
        for position, (entry, param) in enumerate(mine):
            if entry.copy_of is None:
                _load_parameter(files, entry, param, position)
        _copy_tied(entries, mine)
        _check_finite(files, mine)
        return LoadReport(files.bytes_read, len(mine), time.monotonic() - started, unused)


@torch.no_grad()
def _load_parameter(files: HfCheckpoint, entry: Entry, param: torch.nn.Parameter, position: int) -> None:
    shard = shard_group(entry)
    reader = position % shard.replicas.size()
    if shard.replicas.rank() == reader:
        fill_shard(param, entry, shard.rank, shard.size, files.read_slice)
    if shard.replicas.size() > 1:
        dist.broadcast(param.data, dist.get_global_rank(shard.replicas, reader), group=shard.replicas)


def _check_finite(files: HfCheckpoint, mine: list[tuple[Entry, torch.nn.Parameter]]) -> None:
    """One look at the device for all parameters; every rank names the same tensor."""
    flags = torch.stack([all_finite(param.detach()) for _, param in mine]).tolist()
    bad = [source.name for (entry, _), fine in zip(mine, flags, strict=True) if not fine for source in entry.sources]
    gathered: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, bad)
    suspects = list(dict.fromkeys(name for names in gathered for name in names))
    if suspects:
        check_finite(files.model_dir, suspects)
        raise ModelError(f"{suspects[0]} in {files.model_dir} holds values too large for actor.dtype: use float32")


@torch.no_grad()
def _copy_tied(entries: list[Entry], mine: list[tuple[Entry, torch.nn.Parameter]]) -> None:
    """The last stage's copy of a tied embedding comes from the first stage, not from the files again."""
    if (
        all(entry.copy_of is None for entry in entries)
        or parallel_state.get_pipeline_model_parallel_world_size() == 1
        or not parallel_state.is_rank_in_embedding_group(ignore_virtual=True)
    ):
        return
    copies = [param for entry, param in mine if entry.copy_of is not None]
    embeddings = [param for entry, param in mine if entry.layer == "first"]
    group = parallel_state.get_embedding_group()
    dist.broadcast((embeddings or copies)[0].data, dist.get_global_rank(group, 0), group=group)
