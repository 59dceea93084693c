"""Sending tokens to their experts and back, from the router's choices as indices.

Megatron's dispatcher turns the choices into dense [tokens, experts] maps and back with `masked_select`, which waits for
the device in every layer, adds rows up with atomic operations one element at a time, and splits and joins all rows
again where a single rank already has them in order. Here a row's place comes from one sort of the choices, every row
is written once in either direction, and on a single rank nothing is moved twice and no length is read from the device.
"""

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from actor.layers.expert_rows import (
    ReorderedRows,
    SpreadRows,
    SpreadRowsBeside,
    SumRows,
    SumRowsBeside,
    arrivals_by_expert,
    sort_by_expert,
)
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
    """Hidden states pass the router, the routed experts and the expert of every token one after another, so that each
    adds its gradient to that of the next within a kernel that it runs anyway; stock code adds four tensors up."""

    def forward(
        self, hidden_states: torch.Tensor, intermediate_tensors: None = None, padding_mask: None = None
    ) -> tuple[torch.Tensor, None]:
        """hidden_states: [t, 1, h]; returns (output, bias)."""
        if self.moe_layer_recompute:
            return tensor_parallel.checkpoint(self._output, False, hidden_states), None
        return self._output(hidden_states), None

    def _output(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weights, chosen, hidden_states = self.router(hidden_states)
        gate = None if self.shared_experts is None else self.shared_experts.gate_weight
        rows, weights, hidden_states, logits = self.token_dispatcher.spread(hidden_states, chosen, weights, gate)
        shared = self.shared_experts_compute(hidden_states)
        output, _ = self.routed_experts_compute(*self.dispatch(rows, weights))
        return self.token_dispatcher.combine_beside(self.combine(output), shared, logits)


class TopKDispatcher(MoEAlltoAllTokenDispatcher):
    """Between ranks it is Megatron's all-to-all; what happens to rows before and after it is different."""

    def spread(
        self, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """hidden_states: [t, 1, h]; chosen: int64 [t, k], the experts; weights: [t, k]; gate: see `SpreadRowsBeside`.

        Returns (rows [t x k, h], weights [t x k], hidden_states, the gate's logits [t, 1]); rows and weights are sorted
        by expert and, within an expert, by token.
        """
        self.hidden_shape = hidden_states.shape
        self.probs = weights
        order, self._rows, counts = sort_by_expert(chosen, self.num_experts)
        self.tokens_per_expert = self.preprocess(counts.unsqueeze(0))  # it sums the rows of its argument
        if self._ranks > 1:
            if self.num_local_experts > 1:
                self._arriving = self.num_global_tokens_per_local_expert  # before the host's copy takes its place
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        weights = weights.flatten().index_select(0, order)
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        if gate is None:
            return SpreadRows.apply(tokens, self._rows), weights, hidden_states, None
        rows, tokens, logits = SpreadRowsBeside.apply(tokens, self._rows, gate)
        return rows, weights, tokens.view(self.hidden_shape), logits

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows sorted by local expert, tokens of each local expert, weights).

        They arrive rank by rank. Megatron cuts them into a piece for each rank and expert and joins the pieces in
        another order, hundreds of calls of the host in every layer.
        """
        if self._ranks == 1:
            return global_input_tokens, self.tokens_per_expert, global_probs
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        if self.num_local_experts > 1:
            self._order, self._places = arrivals_by_expert(self._arriving, len(global_input_tokens))
            global_input_tokens = ReorderedRows.apply(global_input_tokens, self._order, self._places)
            global_probs = ReorderedRows.apply(global_probs, self._order, self._places)
        tokens_per_expert = self._maybe_dtoh_and_synchronize("before_finish", self.tokens_per_expert)
        self.tokens_per_expert = None
        return global_input_tokens, tokens_per_expert, global_probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The experts' rows in the order in which they came from the ranks."""
        if self._ranks == 1 or self.num_local_experts == 1:
            return hidden_states
        return ReorderedRows.apply(hidden_states, self._places, self._order)

    def combine_beside(
        self, rows: torch.Tensor, shared: torch.Tensor | None, logits: torch.Tensor | None
    ) -> torch.Tensor:
        """[t x k, h], weighted by the experts -> their sum for each token, shaped as the layer's input.

        shared: the output of the expert of every token [t, 1, h], which joins the sum; logits: of its gate [t, 1].
        """
        if shared is None:
            return SumRows.apply(rows, self._rows).view(self.hidden_shape)
        return SumRowsBeside.apply(rows, self._rows, shared.flatten(0, -2), logits).view(self.hidden_shape)

    @property
    def _ranks(self) -> int:
        return self.ep_size * self.tp_size
