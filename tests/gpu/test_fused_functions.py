"""Compiled stretches give what the plain functions give, and another number of rows compiles nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: elsewhere nothing is compiled", allow_module_level=True)

from actor.layers.attention import gate_output
from actor.layers.expert_rows import sort_by_expert, sum_rows
from actor.layers.experts import weighted_swiglu
from actor.layers.gated_delta_net import gated_rms_norm
from actor.layers.norm import rms_norm, zero_centered_rms_norm
from actor.layers.rope import rotate

ROWS = (96, 300, 77, 1024)


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def _choices(rows: int) -> torch.Tensor:
    chosen = torch.rand(rows, 16, device="cuda").argsort(-1)[:, :2]
    return sort_by_expert(chosen)[1]


CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[int], tuple[Any, ...]]]] = {
    "rms_norm": (rms_norm, lambda rows: (_random(rows, 256), _random(256), 1e-6)),
    "zero_centered_rms_norm": (zero_centered_rms_norm, lambda rows: (_random(rows, 256), _random(256), 1e-6)),
    "gated_rms_norm": (
        gated_rms_norm,
        lambda rows: (_random(rows, 4, 64), _random(rows, 800)[:, 100:356].unflatten(-1, (4, 64)), _random(64), 1e-6),
    ),
    "weighted_swiglu": (weighted_swiglu, lambda rows: (_random(rows, 512), torch.rand(rows, 1, device="cuda"))),
    "rotate": (rotate, lambda rows: (_random(rows, 4, 128), _random(rows, 2, 1, 32))),
    "gate_output": (gate_output, lambda rows: (_random(rows, 4, 128), _random(rows, 4, 128))),
    "sum_rows": (sum_rows, lambda rows: (_random(2 * rows, 256), _choices(rows))),
}


def _floats(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    return [one for one in arguments if torch.is_tensor(one) and one.is_floating_point()]


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_those_in_float32(name):
    function, make = CASES[name]
    arguments = make(300)
    wide = tuple(one.float() if torch.is_tensor(one) and one.is_floating_point() else one for one in arguments)
    for tensor in (*_floats(arguments), *_floats(wide)):
        tensor.requires_grad_()
    found, wanted = function(*arguments), function.__wrapped__(*wide)
    gradient = torch.randn_like(wanted)
    found.backward(gradient.to(found.dtype))
    wanted.backward(gradient)
    assert _relative(found, wanted.detach()) < 5e-3
    for narrow, exact in zip(_floats(arguments), _floats(wide), strict=True):
        assert _relative(narrow.grad, exact.grad) < 1e-2


@pytest.mark.parametrize("name", CASES)
def test_other_numbers_of_rows_compile_nothing(name):
    function, make = CASES[name]
    function(*make(200))
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in ROWS:
            function(*make(rows))
