"""RMSNorm on a CPU: torch's to the bit, and its gradients."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from actor.layers.gated_delta_net import gated_rms_norm
from actor.layers.norm import rms_norm, zero_centered_rms_norm

EPSILON = 1e-5


@pytest.mark.parametrize("shape", [(300, 128), (1, 32), (7, 40), (0, 16)])
@pytest.mark.parametrize(("norm", "centre"), [(rms_norm, 0.0), (zero_centered_rms_norm, 1.0)])
def test_a_norm_is_that_of_torch(shape, norm, centre):
    x, weight, gradient = _inputs(*shape)
    assert torch.equal(norm(x, weight, EPSILON), F.rms_norm(x, shape[-1:], weight + centre, EPSILON))
    _check_gradients(
        lambda x, weight: norm(x, weight, EPSILON),
        lambda x, weight: F.rms_norm(x, shape[-1:], weight + centre, EPSILON),
        (x, weight),
        gradient,
    )


def test_the_gated_norm_has_gradients_of_input_gate_and_weight():
    x, weight, gradient = _inputs(50, 3, 32)
    gate = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    _check_gradients(
        lambda x, gate, weight: gated_rms_norm(x, gate, weight, EPSILON),
        lambda x, gate, weight: F.rms_norm(x, (32,), weight, EPSILON) * F.silu(gate),
        (x, gate, weight),
        gradient,
    )


def test_a_norm_of_half_precision_computes_in_float32():
    x, weight, _ = _inputs(20, 64)
    half = rms_norm(x.bfloat16(), weight.bfloat16(), EPSILON)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, rms_norm(x.bfloat16().float(), weight.bfloat16().float(), EPSILON).bfloat16())


def _inputs(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, gradient = torch.randn(2, *shape, generator=generator)
    return x, torch.randn(shape[-1], generator=generator), gradient


def _check_gradients(
    ours: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    gradient: torch.Tensor,
) -> None:
    """Against those of the reference in float64."""
    single = [one.clone().requires_grad_() for one in inputs]
    double = [one.double().requires_grad_() for one in inputs]
    found = torch.autograd.grad(ours(*single), single, gradient)
    expected = torch.autograd.grad(reference(*double), double, gradient.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)
