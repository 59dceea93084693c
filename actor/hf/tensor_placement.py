"""Which entries of the weight table live on this rank, and under which local parameter name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from actor.hf.weight_table import Entry, weight_table
from actor.models.policy_model import PolicyModel, padded_vocabulary, policy_of
from rlpipe.model.description import TrainableModel

ADAPTER = re.compile(r"\.lora\d?\.[ab]$")
DECODER_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class ShardGroup:
    """The ranks over which an entry is cut, and the ranks that hold the same shard of it."""

    rank: int
    size: int
    group: dist.ProcessGroup
    replicas: dist.ProcessGroup


def table_of(chunks: Sequence[torch.nn.Module], model: TrainableModel) -> list[Entry]:
    """The weight table of the built model."""
    return weight_table(
        model,
        padded_vocab_size=padded_vocabulary(model.vocab_size),
        with_mtp=has_mtp(chunks),
    )


def has_mtp(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether the model was built with its multi-token-prediction layer."""
    return policy_of(chunks[0]).config.mtp_num_layers is not None


def local_parameters(
    chunks: Sequence[torch.nn.Module], adapters: bool = False
) -> dict[tuple[str, bool], torch.nn.Parameter]:
    """(global Megatron name, second copy of the embedding) -> parameter, for all chunks of this rank.

    adapters: the factors of adapters, in place of the weights that a Hugging Face model has.
    """
    found = {}
    for chunk in chunks:
        policy = policy_of(chunk)
        for name, param in policy.named_parameters():
            if (ADAPTER.search(name) is not None) != adapters:
                continue
            copied = name == "embedding.word_embeddings.weight" and not policy.pre_process
            found[(global_name(policy, name), copied)] = param
    return found


def global_name(policy: PolicyModel, name: str) -> str:
    """A chunk's parameter name with the decoder layer's number in the whole model."""
    offset = get_transformer_layer_offset(policy.config, vp_stage=policy.vp_stage)
    return DECODER_LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + offset}.", name)


def local_parameter(
    entry: Entry, parameters: Mapping[tuple[str, bool], torch.nn.Parameter]
) -> torch.nn.Parameter | None:
    """This rank's parameter of an entry, None where another pipeline stage has it (or a tied weight needs no copy)."""
    return parameters.get((entry.target, entry.layer == "mtp" and entry.copy_of is not None))


def shard_group(entry: Entry) -> ShardGroup:
    """The process groups of an entry; experts are cut over EP and replicated over the rest of data parallelism."""
    if entry.split == "expert":
        group = parallel_state.get_expert_model_parallel_group()
        replicas = parallel_state.get_expert_data_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return ShardGroup(group.rank(), group.size(), group, replicas)
