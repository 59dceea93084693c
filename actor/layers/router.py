"""The router of a layer with experts, which can be told where tokens go."""

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from actor.layers.packed import PackedSequences


class ReplayRouter(TopKRouter):
    """Megatron's router. Where `routes` are set, tokens go there; the weights of their experts are still its own.

    routes: integers [tokens of this rank, experts per token], of the pack that the layer works on.
    """

    routes: Tensor | None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(probabilities, map): both [tokens, experts], gradients through the probabilities."""
        if self.routes is None:
            return super().routing(logits, padding_mask)
        flat = logits.view(-1, self.config.num_moe_experts)
        chosen = self.routes.to(torch.int64)
        # The softmax over the chosen logits is that over all of them, normalized over the chosen.
        if self.config.moe_router_pre_softmax:
            weights = flat.softmax(-1, dtype=torch.float32).gather(1, chosen)
        else:
            weights = flat.gather(1, chosen).softmax(-1, dtype=torch.float32)
        probabilities = torch.zeros_like(flat).scatter(1, chosen, weights.type_as(flat))
        return probabilities, torch.zeros_like(flat, dtype=torch.bool).scatter(1, chosen, True)


def install_replay(layer: TransformerLayer, layer_index: int) -> None:
    """Let a decoder layer with experts follow the routes of its pack. `layer_index` counts all layers of the model.

    The routes are taken when the layer is called, so that a layer that is computed again in the backward pass, after
    other packs' forward passes, sees those of its own pack.
    """
    router: Any = layer.mlp.router
    router.__class__ = ReplayRouter
    router.routes = None

    def take_routes(_: torch.nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        sequences: PackedSequences = keywords["packed_seq_params"]
        router.routes = None if sequences.routes is None else sequences.routes[:, layer_index]

    layer.register_forward_pre_hook(take_routes, with_kwargs=True)
