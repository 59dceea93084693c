"""Rows of length one: value and gradient, and what is kept for the backward pass."""

import torch

from actor.layers.norm import UnitRows


def _plain(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()).to(x.dtype)


def test_value_and_gradient_are_those_of_plain_torch():
    x = torch.randn(70, 24, generator=torch.Generator().manual_seed(0)).mul(3).requires_grad_()
    direction = torch.randn(70, 24, generator=torch.Generator().manual_seed(1))
    (wanted,) = torch.autograd.grad(_plain(x), x, direction)
    unit = UnitRows.apply(x)
    (found,) = torch.autograd.grad(unit, x, direction)
    torch.testing.assert_close(unit, _plain(x))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_row_of_zeros_stays_zero():
    x = torch.zeros(2, 8, requires_grad=True)
    unit = UnitRows.apply(x)
    unit.sum().backward()
    assert (unit == 0).all()
    assert torch.isfinite(x.grad).all()


def test_half_precision_is_computed_in_float32_and_only_the_result_is_kept():
    kept: list[torch.Tensor] = []
    x = (torch.randn(40, 16, generator=torch.Generator().manual_seed(2)) * 50).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        unit = UnitRows.apply(x)
    torch.testing.assert_close(unit, _plain(x))
    assert unit.dtype is torch.bfloat16
    assert {(tuple(one.shape), one.dtype) for one in kept} == {
        ((40, 16), torch.bfloat16),
        ((40, 1), torch.float32),
    }
    assert all(one.data_ptr() != x.data_ptr() for one in kept)
