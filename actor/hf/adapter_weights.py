"""Adapters of the built chunks: begun afresh, read from a folder in PEFT's layout, written as one."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from actor.hf.adapter_files import (
    adapter_config,
    check_adapter_folder,
    check_equal_experts,
    of_every_expert,
    sources_of,
    write_adapter,
)
from actor.hf.adapter_modules import table_of_adapters
from actor.hf.adapter_table import AdaptedWeight
from actor.hf.engine_adapters import engine_factors
from actor.hf.export import Gatherer
from actor.hf.policy_folder import replace_folder
from actor.hf.safetensors_reader import HfCheckpoint, fill_shard
from actor.hf.tensor_placement import local_parameter, local_parameters, shard_group
from actor.hf.weight_table import Entry
from actor.models.policy_model import policy_of
from rlpipe.config.lora import LoraConfig
from rlpipe.shared.disk_errors import written_whole
from rlpipe.shared.policy_facts import PolicyFacts

_ZERO_FIRST = ("lora_B.weight", "lora_embedding_A")
_ReadSlice = Callable[[str, int, int, int], torch.Tensor]


def start_adapters(chunks: Sequence[torch.nn.Module], lora: LoraConfig, seed: int) -> None:
    """Fill the adapters from `lora.start_path`, or as `lora.init` says. Every rank fills what it has; no layout changes
    a value.

    Raises:
        ModelError: the folder holds no adapter, or another one than is configured.
    """
    table = table_of_adapters(chunks, lora)
    if lora.start_path is None:
        _fill(chunks, table, _FreshFactors(table, lora, seed).read_slice)
        return
    folder = Path(lora.start_path)
    check_adapter_folder(folder, table, lora)
    with HfCheckpoint(folder) as files:
        for adapted in table:
            if adapted.kind == "shared_experts":
                check_equal_experts(files, adapted)
        _fill(chunks, table, files.read_slice)


def save_adapters(
    chunks: Sequence[torch.nn.Module],
    lora: LoraConfig,
    output: Path,
    base: str,
    facts: PolicyFacts | None = None,
) -> None:
    """Write the adapters as PEFT does. Collective; global rank 0 writes, under a hidden name until all is there.

    base: the model that they belong to, as others find it.
    """
    table = table_of_adapters(chunks, lora)
    entries = [entry for one in table for entry in (one.a, one.b)]
    shared = {source.name: one for one in table if one.kind == "shared_experts" for source in sources_of(one)}
    tensors = {}
    gather = Gatherer(chunks)
    for entry in entries:
        for source, tensor in zip(entry.sources, gather.at_rank_zero(entry), strict=True):
            if tensor is not None:
                own = tensor.to("cpu", copy=True).contiguous()
                name = source.name
                tensors[name] = of_every_expert(own, name, shared[name]) if name in shared else own
    if dist.get_rank() == 0:
        partial = output.with_name(f".{output.name}.partial")
        with written_whole(partial):
            partial.mkdir(parents=True, exist_ok=True)
            write_adapter(partial, tensors, adapter_config(table, lora, policy_of(chunks[0]).description, base))
            if facts is not None:
                facts.write(partial)
            replace_folder(partial, output)
    dist.barrier()


def engine_factor_tensors(
    one: AdaptedWeight, lora: LoraConfig, gather: Callable[[Entry], Sequence[torch.Tensor | None]]
) -> Iterator[torch.Tensor | None]:
    """Values of `engine_factors`, on the processes on which `gather` gives tensors of an entry. Collective as that
    is."""
    trained = [*gather(one.a), *gather(one.b)]
    like = next((tensor for tensor in trained if tensor is not None), None)
    values = iter(trained)
    for factor in engine_factors(one, lora.rank):
        if factor.is_trained:
            yield next(values)
        else:
            yield None if like is None else like.new_zeros(factor.shape)


class _FreshFactors:
    """Beginnings of factors, each from a generator of its own name, so that any rank can make any part of them."""

    def __init__(self, table: Sequence[AdaptedWeight], lora: LoraConfig, seed: int) -> None:
        self._shapes = {source.name: source.shape for one in table for source in sources_of(one)}
        self._lora, self._seed = lora, seed
        self._last: tuple[str, torch.Tensor] = ("", torch.empty(0))

    def read_slice(self, name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        if self._last[0] != name:
            self._last = name, self._whole(name)
        return self._last[1].narrow(axis, start, stop - start)

    def _whole(self, name: str) -> torch.Tensor:
        """As PEFT's `reset_lora_parameters`: Kaiming's uniform with a = sqrt(5) is uniform within 1 / sqrt(inputs)."""
        factor = torch.zeros(self._shapes[name])
        if name.endswith(_ZERO_FIRST):
            return factor
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        if name.endswith("lora_embedding_B"):
            return factor.normal_(generator=generator)
        if self._lora.init == "gaussian":
            return factor.normal_(std=1 / self._lora.rank, generator=generator)
        bound = 1 / math.sqrt(factor.shape[1])
        return factor.uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def _fill(chunks: Sequence[torch.nn.Module], table: Sequence[AdaptedWeight], read_slice: _ReadSlice) -> None:
    parameters = local_parameters(chunks, adapters=True)
    for adapted in table:
        for entry in (adapted.a, adapted.b):
            parameter = local_parameter(entry, parameters)
            if parameter is not None:
                shard = shard_group(entry)
                fill_shard(parameter, entry, shard.rank, shard.size, read_slice)
