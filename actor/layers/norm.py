"""RMSNorm for every place of the model."""

from typing import Any

import torch

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
    return RmsNorm.of(x.float(), weight.float(), epsilon).to(x.dtype)


@computed_by("actor.layers.triton_norms")
def zero_centered_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The same with the weight stored as its difference from one."""
    return RmsNorm.of(x.float(), weight.float() + 1.0, epsilon).to(x.dtype)


class RmsNorm(torch.autograd.Function):
    """What `torch.nn.functional.rms_norm` returns, to the bit. On a CPU that is single operators, whose gradients pass
    over the rows twice as often as these, and read what each of them has kept."""

    @classmethod
    def of(cls, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """x: float32 [..., width]; weight: float32 [width]; returns x's shape."""
        normed: torch.Tensor = cls.apply(x.reshape(-1, x.shape[-1]), weight, epsilon)
        return normed.view(x.shape)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        inverse = x.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Of y = x w / r, r the root mean square of a row of n elements: dx = (g w - x sum(g w x) / (n r^2)) / r."""
        x, weight, inverse = ctx.saved_tensors
        product = gradients[0] * x
        share = torch.mv(product, weight)[:, None].mul_(inverse).mul_(inverse).div_(-x.shape[-1])
        of_weight = torch.mv(product.T, inverse[:, 0])
        of_x = torch.mul(gradients[0], weight, out=product).addcmul_(x, share).mul_(inverse)
        return of_x, of_weight, None
