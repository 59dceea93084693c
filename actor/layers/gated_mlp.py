"""MLPs with SwiGLU: dense ones, and the expert that every token passes beside its own."""

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from actor.layers.swiglu import swiglu


class GatedMlp(MLP):
    """Megatron's MLP without a bias, whose activation is one kernel: its own moves the inner tensor three times as
    often."""

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: None = None, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states: [t, 1, h]; returns (output, bias)."""
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(gate_up.flatten(0, -2)).unflatten(0, gate_up.shape[:-1]))


class SharedExpert(SharedExpertMLP, GatedMlp):
    """The expert of every token. Its gate is applied where its output meets that of the routed experts."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """hidden_states: [t, 1, h]; returns the output without the gate, of the same shape."""
        output, _ = GatedMlp.forward(self, hidden_states)
        return output
