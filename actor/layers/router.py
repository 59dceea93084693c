"""The router of a layer with experts, which can be told where tokens go."""

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from actor.layers.packed import PackedSequences


class ReplayRouter(TopKRouter):
    """A softmax router whose choices are indices. Where `routes` are set, tokens go there instead of to the highest
    logits; the weights of their experts are still its own.

    routes: integers [tokens of this rank, experts per token], of the pack that the layer works on.
    """

    routes: Tensor | None = None

    def forward(self, input: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(weights, choices, the input for those who take it next; see `Logits`)."""
        logits, passed = Logits.apply(input.flatten(0, -2), self.weight)
        return *self.routing(logits), passed.view_as(input)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(weights, choices): float32 and int64, both [tokens, experts per token]; see `expert_dispatch`."""
        scores = logits
        if self.config.normalize_top_k and self.routes is None:
            # The softmax over the chosen logits is that over all of them, normalized over the chosen.
            return NormalizedChoice.apply(scores, self.topk)
        if not self.config.normalize_top_k:
            scores = scores.softmax(-1, dtype=torch.float32)
        if self.routes is None:
            weights, chosen = scores.topk(self.topk)
        else:
            chosen = self.routes.to(torch.int64)
            weights = scores.gather(1, chosen)
        if self.config.normalize_top_k:
            weights = weights.softmax(-1, dtype=torch.float32)
        return weights, chosen


class Logits(torch.autograd.Function):
    """(x @ weight^T in float32, x): a choice between nearly equal experts must not hang on bfloat16's rounding.

    The product of bfloat16 values is exact in float32, so casting both to float32 first, as stock code does
    (moe_utils.py:1190), gains no digit and runs ten times slower, outside the tensor cores. The gradient goes back in
    the dtype of `x`, like that of every other projection.

    Who takes `x` next takes it from here: its gradient is added within the product that makes the one of `x`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        if x.is_cuda and x.dtype is not torch.float32:
            return torch.mm(x, weight.t(), out_dtype=torch.float32), x.view_as(x)
        return x.float() @ weight.float().t(), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].to(x.dtype)
        of_x = torch.addmm(gradients[1], gradient, weight) if ctx.needs_input_grad[0] else None
        return of_x, gradient.t() @ x if ctx.needs_input_grad[1] else None


class NormalizedChoice(torch.autograd.Function):
    """(softmax of the highest `count` logits, which they are), both [t, count]. logits: float32 [t, experts]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        weights, chosen = _choose(logits, count)
        ctx.save_for_backward(weights, chosen)
        ctx.mark_non_differentiable(chosen)
        ctx.experts = logits.shape[1]
        return weights, chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        weights, chosen = ctx.saved_tensors
        gradient = gradients[0] * weights
        gradient = gradient - weights * gradient.sum(-1, keepdim=True)
        return gradient.new_zeros(len(weights), ctx.experts).scatter_(1, chosen, gradient), None


def _choose(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if logits.is_cuda:
        from actor.layers.triton_kernels import choose

        return choose(logits, count)
    values, chosen = logits.topk(count)
    return values.softmax(-1), chosen


def install_replay(layer: TransformerLayer, layer_index: int) -> None:
    """Let a decoder layer with experts follow the routes of its pack. `layer_index` counts all layers of the model.

    The routes are taken when the layer is called, so that a layer that is computed again in the backward pass, after
    other packs' forward passes, sees those of its own pack.
    """
    router: Any = layer.mlp.router

    def take_routes(_: torch.nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        sequences: PackedSequences = keywords["packed_seq_params"]
        router.routes = None if sequences.routes is None else sequences.routes[:, layer_index]

    layer.register_forward_pre_hook(take_routes, with_kwargs=True)
