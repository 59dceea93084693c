"""Build the policy's chunks on this rank."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

from actor.device import has_own_memory
from actor.models.layer_spec import block_spec, layer_spec
from actor.models.mtp import mtp_spec
from actor.models.policy_model import PolicyModel, padded_vocabulary, policy_of
from actor.models.transformer_config import transformer_config
from rlpipe.config.actor import ActorConfig
from rlpipe.model.description import TrainableModel

__all__ = ["build_model", "reduce_replicated_gradients"]


def build_model(model: TrainableModel, actor: ActorConfig) -> list[PolicyModel]:
    """The chunks of this pipeline rank (one per virtual stage), in training mode, weights not yet loaded.

    `parallel_state` must be initialised with `actor.parallel`'s sizes.

    Raises:
        ModelError: the parallel layout does not divide the model.
    """
    config = transformer_config(model, actor)
    stages = range(actor.parallel.virtual_pipeline) if actor.parallel.virtual_pipeline else [None]
    head_chunk_tokens = actor.head_chunk_tokens(has_own_memory())
    return [_chunk(model, config, stage, head_chunk_tokens) for stage in stages]


def _chunk(model: TrainableModel, config: Any, vp_stage: int | None, head_chunk_tokens: int) -> PolicyModel:
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    with_mtp = last and config.mtp_num_layers is not None
    chunk = PolicyModel(
        model,
        config,
        padded_vocab_size=padded_vocabulary(model.vocab_size),
        head_chunk_tokens=head_chunk_tokens,
        transformer_layer_spec=block_spec(model, config, vp_stage),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=last,
        mtp_block_spec=mtp_spec(layer_spec(model, "full_attention", model.experts is not None)) if with_mtp else None,
        vp_stage=vp_stage,
    )
    _mark_shards(chunk)
    return chunk.to(torch.device(torch.cuda.current_device())).train()


def _mark_shards(chunk: PolicyModel) -> None:
    """Tell Megatron which weights are cut over tensor ranks: the gradient norm counts all others on one rank only.

    Its layers set these marks only while they initialize weights, which is switched off (layers.py:855).
    """
    axes = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in chunk.modules():
        axis = next((axis for kind, axis in axes.items() if isinstance(module, kind)), None)
        if axis is None:
            continue
        for name, param in module.named_parameters(recurse=False):
            if name == "weight" or axis == 0:
                param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, axis, 1


def reduce_replicated_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Sum over tensor-parallel ranks the gradients of parameters that are replicated but see only own heads.

    Megatron sums those of q/k norms and, under sequence parallelism, of marked parameters
    (finalize_model_grads.py:353); the gated norm inside Gated DeltaNet is neither when sequence parallelism is off
    (B6). Call it after `finalize_model_grads`.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return
    for chunk in chunks:
        if policy_of(chunk).config.sequence_parallel:
            continue
        for param in chunk.parameters():
            if not getattr(param, "partial_over_tensor_parallel", False):
                continue
            gradient = getattr(param, "main_grad", None)
            gradient = param.grad if gradient is None else gradient
            if gradient is not None:
                dist.all_reduce(gradient, group=group)
