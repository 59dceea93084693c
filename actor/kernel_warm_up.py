"""Meeting every class of pack before training, without a trace in weights, optimizer or random numbers."""

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel

from actor.device import compute_device, peak_allocation
from actor.layers.causal_attention import Heads, LongShapes, plan_long_sequences
from actor.models.policy_model import take_mtp_loss
from actor.reduction import any_rank, first_non_finite, reduce_metrics
from actor.trainer import Trainer
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.shared.pack import Pack

logger = logging.getLogger(__name__)


def warm_up(
    trainer: Trainer,
    training: Sequence[Pack],
    forward_only: Sequence[Pack],
    algorithm: AlgorithmConfig,
    longest_sequence_tokens: int,
) -> None:
    """Forward and backward passes over `training` and passes without gradients over `forward_only`. Collective.

    Gradients and metrics are exchanged and measured as in a step, which sets up all communicators, and then thrown
    away.
    """
    longest_tokens = min(longest_sequence_tokens, max(pack.cu_seqlens_padded[-1] for pack in training))
    with unchanged_generators(), trainer.clock.part("warm_up"), peak_allocation() as peak_bytes:
        results = trainer.accumulate(training, algorithm)
        trainer.optimizer.finish_gradients()
        reduce_metrics(results)
        any_rank(first_non_finite(results) is not None)
        trainer.optimizer.gradient_norm()
        trainer.optimizer.zero_gradients()
        take_mtp_loss(trainer.policy[-1])
        trainer.logprobs(forward_only, "policy")
        trainer.memory.pass_bytes = max(peak_bytes(), trainer.memory.pass_bytes or 0)
        _plan_attention(trainer, longest_tokens)


def _plan_attention(trainer: Trainer, longest_tokens: int) -> None:
    """For the heads that one rank holds, of sequences or of its pieces of them."""
    config, actor = trainer.policy[0].config, trainer.options.actor
    heads = Heads.of_rank(
        config.num_attention_heads,
        config.num_query_groups,
        config.kv_channels,
        actor.parallel.tensor,
        config.params_dtype,
    )
    shapes = LongShapes.of(longest_tokens, actor.parallel.context, parallel_state.get_context_parallel_rank())
    planned = plan_long_sequences(heads, shapes, compute_device(), actor.recompute.chosen != "none")
    if planned:
        logger.info("attention of long sequences runs on cuDNN, which planned it for %d shapes", planned)


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Whatever is drawn inside the block, all generators of the process go on as if nothing had been."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    megatron = tensor_parallel.get_cuda_rng_tracker().get_states()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        tensor_parallel.get_cuda_rng_tracker().set_states(megatron)
