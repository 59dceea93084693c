"""Finds the packs behind a gradient that is not finite, by going through them one at a time."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from actor.device import compute_device
from actor.models.policy_model import take_mtp_loss
from actor.passes import HeadOptions, forward_backward
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.config.layout import ActorLayout
from rlpipe.shared.pack import Pack


def packs_with_bad_gradients(
    chunks: Sequence[torch.nn.Module],
    packs: Sequence[Pack],
    head: HeadOptions,
    algorithm: AlgorithmConfig,
    layout: ActorLayout,
) -> tuple[str, ...]:
    """Sample ids of this rank's packs whose own backward pass leaves a gradient without a finite norm.

    Runs the step's passes again, which costs as much as another step, after a skipped one only. Empty where every
    single pack is fine and only their sum overflows. With expert parallelism a rank also names its own pack where
    another rank's pack of the same number spoiled the experts they share. Collective: all ranks have the same number of
    packs.
    """
    culprits: list[str] = []
    with _gradients_stay_local(chunks):
        for pack in packs:
            for chunk in chunks:
                chunk.zero_grad_buffer()  # type: ignore[operator]
            forward_backward(chunks, layout.filled([pack]), head, algorithm)
            if not _finite(chunks):
                culprits += pack.sample_ids
            take_mtp_loss(chunks[-1])  # of this pass, so that it does not count in the next step
    return tuple(culprits)


@contextmanager
def _gradients_stay_local(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """No data-parallel exchange in the backward pass: all chunks share one wrapper configuration."""
    options: Any = chunks[0].ddp_config
    overlap, options.overlap_grad_reduce = options.overlap_grad_reduce, False
    try:
        yield
    finally:
        options.overlap_grad_reduce = overlap


def _finite(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether the sum of squares is finite, as the gradient norm asks: it overflows before a gradient does."""
    total = torch.zeros((), device=compute_device())
    for chunk in chunks:
        for parameter in chunk.parameters():
            if parameter.requires_grad:
                total += torch.linalg.vector_norm(parameter.main_grad).square()  # type: ignore[attr-defined]
    return math.isfinite(total.item())
