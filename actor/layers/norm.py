"""RMSNorm for every place of the model."""

from typing import Any

import torch
import torch.nn.functional as F

from actor.layers.fusion import computed_by


class Norm(torch.nn.Module):
    """RMSNorm over the last dimension; the weight is stored around zero where the family does so (Qwen3-Next, 3.5).

    Megatron's own `WrappedTorchNorm` refuses sequence parallelism and zero-centred weights. The weight is marked
    `sequence_parallel`, so that Megatron sums its gradient over tensor-parallel ranks that saw different tokens.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = bool(config.layernorm_zero_centered_gamma)
        fill = torch.zeros if self.zero_centered else torch.ones
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(fill(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize in float32, return in `x`'s dtype."""
        rows = x.reshape(-1, x.shape[-1])
        norm = zero_centered_rms_norm if self.zero_centered else rms_norm
        return norm(rows, self.weight, self.eps).view(x.shape)


@computed_by("actor.layers.triton_norms")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / rms(x) x weight over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467). x: [n, width]."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), epsilon).to(x.dtype)


@computed_by("actor.layers.triton_norms")
def zero_centered_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The same with the weight stored as its difference from one."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float() + 1.0, epsilon).to(x.dtype)
