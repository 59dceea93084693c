"""Adapters of a built chunk of the policy: put in, found again, listed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from actor.hf.adapter_table import AdaptedWeight, Kind, adapter_table
from actor.hf.tensor_placement import local_parameters, shard_group
from actor.hf.weight_table import PADDING
from actor.layers.expert_lora import ExpertsLora, SharedExpertsLora
from actor.layers.experts import GroupedExperts
from actor.layers.float8_weight import pack
from actor.layers.lora import (
    ColumnLora,
    EmbeddingLora,
    HeadLora,
    Lora,
    LoraColumnLinear,
    LoraEmbedding,
    LoraPlace,
    LoraRowLinear,
    RowLora,
)
from actor.models.policy_model import PolicyModel, padded_vocabulary, policy_of
from rlpipe.config.lora import LoraConfig

_CLASSES: dict[Kind, type[Lora]] = {
    "column": ColumnLora,
    "row": RowLora,
    "embedding": EmbeddingLora,
    "head": HeadLora,
    "experts": ExpertsLora,
    "shared_experts": SharedExpertsLora,
}


def install_adapters(chunks: Sequence[PolicyModel], lora: LoraConfig) -> None:
    """Freeze the chunks' weights and give those that `lora` names their adapters, all zeros for now.

    Raises:
        ActorError: a target matches nothing, or what cannot be adapted by itself.
    """
    for chunk in chunks:
        chunk.lora = lora
        chunk.requires_grad_(False)
        parameters = local_parameters([chunk])
        names = {id(parameter): name for name, parameter in chunk.named_parameters()}
        for adapted in table_of_adapters(chunks, lora):
            weight = parameters.get((adapted.weight.target, False))
            if weight is not None:
                layer: Any = chunk.get_submodule(names[id(weight)].rsplit(".", 1)[0])
                layer.add_module(adapted.module, _CLASSES[adapted.kind](chunk.config, _place(adapted), weight, lora))
                if adapted.kind == "embedding":
                    layer.__class__ = LoraEmbedding


def pack_base(chunks: Sequence[PolicyModel], lora: LoraConfig) -> None:
    """Round the loaded projections to 8 bits where `lora.base` says so: those of decoder layers, routed experts among
    them. Embedding, head, norms, convolutions and routers stay as they are."""
    if lora.base != "float8":
        return
    for chunk in chunks:
        for module in chunk.decoder.modules():
            names = ("weight1", "weight2") if isinstance(module, GroupedExperts) else ("weight",)
            if isinstance(module, GroupedExperts | LoraColumnLinear | LoraRowLinear):
                for name in names:
                    pack(getattr(module, name))


def _place(adapted: AdaptedWeight) -> LoraPlace:
    group = shard_group(adapted.weight)
    pieces = adapted.weight.shard(group.rank, group.size)
    return LoraPlace(
        target=adapted.weight.target,
        pairs=sum(slot is not None for slot in adapted.slots),
        rows=tuple((None if piece.source == PADDING else adapted.slots[piece.source], piece.size) for piece in pieces),
        sections=tuple(sum(piece.size for piece in part) // group.size for part in adapted.weight.sections),
    )


def adapters(chunks: Sequence[torch.nn.Module]) -> Iterator[Lora]:
    """Those of this rank, in the order of the chunks' modules."""
    for chunk in chunks:
        yield from (module for module in policy_of(chunk).modules() if isinstance(module, Lora))


def adapters_by_weight(chunks: Sequence[torch.nn.Module]) -> dict[str, Lora]:
    """Global name of a frozen weight of this rank -> its adapter."""
    return {lora.place.target: lora for lora in adapters(chunks)}


@contextmanager
def without_dropout(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the block adapters see all of their inputs."""
    found = list(adapters(chunks))
    for lora in found:
        lora.eval()
    try:
        yield
    finally:
        for lora in found:
            lora.train()


def table_of_adapters(chunks: Sequence[torch.nn.Module], lora: LoraConfig) -> list[AdaptedWeight]:
    """All adapters of the model, those of other ranks too."""
    model = policy_of(chunks[0]).description
    return adapter_table(model, lora, padded_vocab_size=padded_vocabulary(model.vocab_size))
