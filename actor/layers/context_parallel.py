"""Collectives of context parallelism along the token dimension, with the full backward."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class GatherTokens(torch.autograd.Function):
    """All-gather of shards [t, ...] to [CP x t, ...] in rank order.

    Every rank's loss depends on every shard, so the backward SUMS over ranks (reduce-scatter). Keeping only the local
    slice of the incoming gradient would drop the terms that later pieces on other ranks contribute.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        local = gradient.new_empty((gradient.shape[0] // ctx.group.size(), *gradient.shape[1:]))
        dist.reduce_scatter_tensor(local, gradient.contiguous(), group=ctx.group)
        return local, None


class TokensToHeads(torch.autograd.Function):
    """Own tokens with all heads become all tokens with own heads, in the order of the pack.

    x: [t, channels], sections of `widths` channels one after another, each of which has its heads in the order of
    ranks; returns [CP x t, channels / CP], with the same sections. order: int64 [CP x t], of tokens as they lie rank by
    rank the one in each place of the pack; places: its inverse, by which gradients go back without adding anything up.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        widths: Sequence[int],
        group: dist.ProcessGroup,
        order: torch.Tensor,
        places: torch.Tensor,
    ) -> torch.Tensor:
        ctx.group, ctx.widths = group, widths
        ctx.save_for_backward(places)
        sent = torch.cat(_by_rank(x, widths, group.size()), -1)
        return _swapped(sent, group).flatten(0, 1).index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        ranks = ctx.group.size()
        received = _swapped(gradients[0].index_select(0, places).unflatten(0, (ranks, -1)), ctx.group)
        gradient = received.new_empty(received.shape[1], sum(ctx.widths))
        parts = received.split([width // ranks for width in ctx.widths], -1)
        for target, part in zip(_by_rank(gradient, ctx.widths, ranks), parts, strict=True):
            target.copy_(part)
        return gradient, None, None, None, None


class HeadsToTokens(torch.autograd.Function):
    """All tokens in the order of the pack with own heads become own tokens with all heads: the way back.

    x: [CP x t, channels / CP], of one section; returns [t, channels]. order: int64 [CP x t], of the pack's tokens those
    of the first rank, of the second and so on; places: its inverse.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, order: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(places)
        received = _swapped(x.index_select(0, order).unflatten(0, (group.size(), -1)), group)
        return received.transpose(0, 1).flatten(1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        (sent,) = _by_rank(gradients[0], gradients[0].shape[1:], ctx.group.size())
        return _swapped(sent.contiguous(), ctx.group).flatten(0, 1).index_select(0, places), None, None, None


def _by_rank(x: torch.Tensor, widths: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """Views [ranks, t, width / ranks] of the sections of x [t, channels]."""
    return [part.unflatten(-1, (ranks, -1)).transpose(0, 1) for part in x.split(list(widths), -1)]


def _swapped(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-to-all of equal blocks along dimension 0: block i goes to rank i, blocks arrive in rank order."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def gather_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Shards of all ranks one after another along dimension 0."""
    return x if group.size() == 1 else GatherTokens.apply(x, group)
