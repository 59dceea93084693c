"""SwiGLU (Shazeer 2020, arXiv:2002.05202), as one kernel in each direction on a GPU."""

from typing import Any

import torch
import torch.nn.functional as F

from actor.layers.fusion import computed_by

_KERNELS = "actor.layers.triton_kernels"  # without gradients, which the functions below have


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) x up. gate_up: [n, 2 x width], gate before up; returns [n, width]."""
    product: torch.Tensor = Swiglu.apply(gate_up) if gate_up.is_cuda else product_of(gate_up)
    return product


def weighted_swiglu(gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """silu(gate) x up x weight. gate_up: [n, 2 x width], gate before up; weights: float32 [n, 1]; returns [n, width].

    Weighing the inner side of the expert costs a quarter of what weighing its output would.
    """
    if gate_up.is_cuda:
        product: torch.Tensor = WeightedSwiglu.apply(gate_up, weights)
        return product
    return weighted_product_of(gate_up, weights)


@computed_by(_KERNELS)
def product_of(gate_up: torch.Tensor) -> torch.Tensor:
    """What `swiglu` returns."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@computed_by(_KERNELS)
def weighted_product_of(gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What `weighted_swiglu` returns."""
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) * up * weights).to(gate_up.dtype)


class Swiglu(torch.autograd.Function):
    """Keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return product_of(gate_up)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        from actor.layers.triton_kernels import swiglu_gradient

        (gate_up,) = ctx.saved_tensors
        return swiglu_gradient(gradients[0], gate_up, None)[0]


class WeightedSwiglu(torch.autograd.Function):
    """The same; gradients of the weights come with those of the input, from one reading."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up, weights)
        return weighted_product_of(gate_up, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from actor.layers.triton_kernels import swiglu_gradient

        return swiglu_gradient(gradients[0], *ctx.saved_tensors)
