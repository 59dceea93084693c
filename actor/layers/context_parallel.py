"""Collectives of context parallelism along the token dimension, with the full backward."""

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


class ExchangeTokensAndHeads(torch.autograd.Function):
    """All-to-all of equal blocks along dimension 0: block i goes to rank i, blocks arrive in rank order.

    It is its own inverse, hence its own backward.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        sent = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(sent, gradient.contiguous(), group=ctx.group)
        return sent, None


def gather_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Shards of all ranks one after another along dimension 0."""
    return x if group.size() == 1 else GatherTokens.apply(x, group)


def tokens_to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[t, ranks, ...] (own tokens, channels grouped by destination) -> [ranks x t, ...] (all tokens, own channels)."""
    swapped = ExchangeTokensAndHeads.apply(x.transpose(0, 1).contiguous(), group)
    return swapped.flatten(0, 1)


def heads_to_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The inverse of `tokens_to_heads`: [ranks x t, ...] -> [t, ranks, ...]."""
    blocks = x.reshape(group.size(), -1, *x.shape[1:])
    return ExchangeTokensAndHeads.apply(blocks, group).transpose(0, 1)
