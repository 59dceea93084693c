"""Sending tokens to their experts and back, from the router's choices as indices.

Megatron's dispatcher turns the choices into dense [tokens, experts] maps and back with `masked_select`, which waits for
the device in every layer, adds rows up with atomic operations one element at a time, and splits and joins all rows
again where a single rank already has them in order. Here a row's place comes from one sort of the choices, both
directions gather, and on a single rank nothing is moved twice and no length is read from the device.
"""

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from actor.layers.expert_rows import SpreadRows, SumRows, sort_by_expert


def install_dispatch(model: torch.nn.Module) -> None:
    """Let every layer with experts of `model` use this module's dispatcher; its router must be a `ReplayRouter`."""
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.token_dispatcher.__class__ = TopKDispatcher


class TopKDispatcher(MoEAlltoAllTokenDispatcher):
    """Between ranks it is Megatron's all-to-all; what happens to rows before and after it is different."""

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states: [t, 1, h]; routing_map: int64 [t, k], the experts; probs: [t, k], their weights.

        Returns (rows [t x k, h], weights [t x k]), sorted by expert and, within an expert, by token.
        """
        self.hidden_shape = hidden_states.shape
        self.probs = probs
        chosen = torch.zeros(len(routing_map), self.num_experts, dtype=torch.bool, device=routing_map.device)
        self.tokens_per_expert = self.preprocess(chosen.scatter_(1, routing_map, True))
        if self._ranks > 1:
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        self._order, self._rows = sort_by_expert(routing_map)
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        return SpreadRows.apply(tokens, self._order, self._rows), probs.flatten().index_select(0, self._order)

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows sorted by local expert, tokens of each local expert, weights)."""
        if self._ranks > 1:
            return super().dispatch_postprocess(global_input_tokens, global_probs)
        return global_input_tokens, self.tokens_per_expert, global_probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The experts' rows in the order in which they came from the ranks."""
        return super().combine_preprocess(hidden_states) if self._ranks > 1 else hidden_states

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """[t x k, h], weighted by the experts -> their sum for each token, shaped as the layer's input."""
        return SumRows.apply(permutated_local_input_tokens, self._order, self._rows).view(self.hidden_shape)

    @property
    def _ranks(self) -> int:
        return self.ep_size * self.tp_size
