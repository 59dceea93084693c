"""Sending tokens to their experts and back, from the router's choices as indices.

Megatron's dispatcher turns the choices into dense [tokens, experts] maps and back with `masked_select`, which waits for
the device in every layer, adds rows up with atomic operations one element at a time, and splits and joins all rows
again where a single rank already has them in order. Here a row's place comes from one sort of the choices, every row
is written once in either direction, and on a single rank nothing is moved twice and no length is read from the device.
Between ranks the host reads once in a layer how many rows go where: whatever else it read or wrote would wait for all
that the device has been given.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from actor.device import host_buffer_like
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
from actor.transfer_stream import record_compute, wait_on_host


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
    """What Megatron's layer asks of a dispatcher, in its order: `spread` (instead of `dispatch_preprocess`),
    `token_dispatch`, `dispatch_postprocess`, `combine_preprocess`, `token_combine`, `combine_beside`."""

    def spread(
        self, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """hidden_states: [t, 1, h]; chosen: int64 [t, k], the experts; weights: [t, k]; gate: see `SpreadRowsBeside`.

        Returns (rows [t x k, h], weights [t x k], hidden_states, the gate's logits [t, 1]); rows and weights are sorted
        by expert and, within an expert, by token.
        """
        self.hidden_shape = hidden_states.shape
        order, self._rows, self._counts = sort_by_expert(chosen, self.num_experts)
        if self.ep_size > 1:
            self._plan_exchange()
        weights = weights.flatten().index_select(0, order)
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        if gate is None:
            return SpreadRows.apply(tokens, self._rows), weights, hidden_states, None
        rows, tokens, logits = SpreadRowsBeside.apply(tokens, self._rows, gate)
        return rows, weights, tokens.view(self.hidden_shape), logits

    def _plan_exchange(self) -> None:
        """Tell all ranks how many rows each expert gets from here, and begin to copy to the host what it has to know:
        rows that go to each rank and that come from each."""
        everywhere = self._counts.new_empty(self.ep_size * self.num_experts)
        dist.all_gather_into_tensor(everywhere, self._counts, group=self.ep_group)
        first = self.local_expert_indices[0]
        self._arriving = everywhere.view(self.ep_size, -1)[:, first : first + self.num_local_experts]
        splits = torch.stack((self._counts.view(self.ep_size, -1).sum(1), self._arriving.sum(1)))
        self._counts = self._arriving.sum(0)
        self._splits = host_buffer_like(splits)
        self._splits.copy_(splits, non_blocking=True)
        self._splits_copied = record_compute()

    def token_dispatch(self, rows: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and weights of this rank's experts, rank by rank."""
        if self.ep_size == 1:
            return rows, weights
        wait_on_host(self._splits_copied)
        self._sent, self._came = self._splits.tolist()
        arrived: tuple[torch.Tensor, torch.Tensor] = SentRows.apply(
            self.ep_group, self._sent, self._came, rows, weights
        )
        return arrived

    def dispatch_postprocess(
        self, rows: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows sorted by local expert, rows of each local expert, weights)."""
        if self.ep_size > 1 and self.num_local_experts > 1:
            self._order, self._places = arrivals_by_expert(self._arriving, len(rows))
            rows = ReorderedRows.apply(rows, self._order, self._places)
            weights = ReorderedRows.apply(weights, self._order, self._places)
        return rows, self._counts, weights

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The experts' rows in the order in which they came from the ranks."""
        if self.ep_size == 1 or self.num_local_experts == 1:
            return hidden_states
        rows: torch.Tensor = ReorderedRows.apply(hidden_states, self._places, self._order)
        del self._order, self._places, self._arriving  # in every layer, they would take memory until its next pass
        return rows

    def token_combine(self, hidden_states: torch.Tensor, *_: object) -> torch.Tensor:
        """The rows that this rank sent, from their experts."""
        if self.ep_size == 1:
            return hidden_states
        rows: torch.Tensor
        (rows,) = SentRows.apply(self.ep_group, self._came, self._sent, hidden_states)
        return rows

    def combine_beside(
        self, rows: torch.Tensor, shared: torch.Tensor | None, logits: torch.Tensor | None
    ) -> torch.Tensor:
        """[t x k, h], weighted by the experts -> their sum for each token, shaped as the layer's input.

        shared: the output of the expert of every token [t, 1, h], which joins the sum; logits: of its gate [t, 1].
        """
        places = self._rows
        del self._rows, self._counts
        if shared is None:
            return SumRows.apply(rows, places).view(self.hidden_shape)
        return SumRowsBeside.apply(rows, places, shared.flatten(0, -2), logits).view(self.hidden_shape)


class SentRows(torch.autograd.Function):
    """Tensors whose rows go to ranks of `group`, `sent[i]` to rank i, one rank's after another's; `came[i]` come from
    rank i. Gradients go back the same way."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, sent: list[int], came: list[int], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.sent, ctx.came = group, sent, came
        return tuple(_sent(tensor, group, sent, came) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = zip(gradients, ctx.needs_input_grad[3:], strict=True)
        back = [_sent(one, ctx.group, ctx.came, ctx.sent) if needed else None for one, needed in wanted]
        return None, None, None, *back


def _sent(tensor: torch.Tensor, group: dist.ProcessGroup, sent: list[int], came: list[int]) -> torch.Tensor:
    received = tensor.new_empty(sum(came), *tensor.shape[1:])
    dist.all_to_all_single(received, tensor.contiguous(), came, sent, group=group)
    return received
