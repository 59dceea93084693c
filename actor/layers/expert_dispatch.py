"""Sending tokens to their experts and back, from the router's choices as indices.

Megatron's dispatcher turns the choices into dense [tokens, experts] maps and back with `masked_select`, which waits for
the device in every layer, adds rows up with atomic operations one element at a time, and splits and joins all rows
again where a single rank already has them in order. Here a row's place comes from one sort of the choices, every row
is written once in either direction, and on a single rank nothing is moved twice and no length is read from the device.
"""

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from actor.layers.expert_rows import SpreadRows, SumRows, SumRowsBeside, sort_by_expert
from actor.layers.gated_mlp import GatedMlp, SharedExpert


def install_feed_forward(model: torch.nn.Module) -> None:
    """Let MLPs of `model` be those of `gated_mlp`, and layers with experts use this module's dispatcher.

    Their router must be a `ReplayRouter`.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.__class__ = ExpertsLayer
            module.token_dispatcher.__class__ = TopKDispatcher
            if module.shared_experts is not None:
                module.shared_experts.__class__ = SharedExpert
        elif type(module) is MLP:
            module.__class__ = GatedMlp


class ExpertsLayer(MoELayer):
    """Adds the routed experts and the one of every token in one kernel."""

    def postprocess(
        self, output: torch.Tensor, shared_expert_output: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """output: [t x k, h], of the routed experts; shared_expert_output: see `SharedExpert`."""
        return self.token_dispatcher.combine_beside(output, shared_expert_output)


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
        order, self._rows, counts = sort_by_expert(routing_map, self.num_experts)
        self.tokens_per_expert = self.preprocess(counts.unsqueeze(0))  # it sums the rows of its argument
        if self._ranks > 1:
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        return SpreadRows.apply(tokens, self._rows), probs.flatten().index_select(0, order)

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

    def combine_beside(self, rows: torch.Tensor, shared: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """[t x k, h], weighted by the experts -> their sum for each token and `shared`, shaped as the layer's input."""
        if shared is None:
            return SumRows.apply(rows, self._rows).view(self.hidden_shape)
        output, logits = (x.flatten(0, -2) for x in shared)
        return SumRowsBeside.apply(rows, self._rows, output, logits).view(self.hidden_shape)

    @property
    def _ranks(self) -> int:
        return self.ep_size * self.tp_size
