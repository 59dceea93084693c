"""Run with TRITON_INTERPRET=1: Triton's interpreter computes the actor's kernels on a CPU, beside plain torch."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from actor.layers import (
    expert_rows,
    gated_delta_net,
    logits,
    norm,
    swiglu,
    triton_kernels,
    triton_logits,
    triton_norms,
)
from actor.layers.expert_rows import sort_by_expert
from actor.layers.gdn_inputs import ProjectedHeads
from actor.layers.gdn_torch import projected_heads
from actor.layers.packed import PackedSequences
from actor.layers.triton_kernels import choose, swiglu_gradient

PACKS = {(0, 1, 3, 10, 64, 124, 128, 131): (16, 8), (0, 140): (8, 12)}
KEY_HEADS, VALUE_HEADS = 2, 4


def main() -> None:
    torch.manual_seed(0)
    for ends, channels in PACKS.items():
        _check_heads(ends, channels)
    for experts in (5, 60):
        _check_broken_choices(experts)
    for width in (48, 5000):
        _check_rows(width)
    for width in (12, 32):
        _check_norms(width)
    _check_swiglu()
    for columns in (5, 16, 150):
        _check_logits(columns)


def _check_heads(ends: tuple[int, ...], channels: tuple[int, int]) -> None:
    tokens, (key, value) = ends[-1], channels
    sequences = PackedSequences(qkv_format="thd", ends=ends, device=torch.device("cpu"))
    shapes = ((KEY_HEADS, key), (KEY_HEADS, key), (VALUE_HEADS, value), (VALUE_HEADS * value,), (VALUE_HEADS,))
    weights = [torch.randn(heads * width, 4) for heads, width in shapes[:3]]
    projected = torch.randn(tokens, 2 * KEY_HEADS * key + 2 * VALUE_HEADS * value + 2 * VALUE_HEADS)
    upstream = [torch.randn(tokens, *shape) for shape in (*shapes, shapes[-1])]

    def run(heads: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        leaves = [one.clone().requires_grad_() for one in (projected, *weights)]
        outputs = heads(leaves)
        return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]

    found = run(lambda leaves: ProjectedHeads.apply(*leaves, sequences.places, *channels))
    wanted = run(lambda leaves: projected_heads(leaves[0], leaves[1:], channels, sequences))
    for one, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, right, atol=1e-4, rtol=1e-4)


def _check_broken_choices(experts: int) -> None:
    logits = torch.randn(40, experts)
    logits[0], logits[1, 3], logits[2], logits[3, 4] = float("nan"), float("nan"), float("-inf"), float("inf")
    logits[4, :-1] = float("-inf")
    weights, chosen = choose(logits, 3)
    values, wanted = logits.topk(3)
    torch.testing.assert_close(weights, values.softmax(-1), equal_nan=True)
    assert torch.equal(chosen[5:], wanted[5:])
    ordered = chosen.sort(-1).values
    assert ordered.min() >= 0 and ordered.max() < experts and (ordered.diff() > 0).all()


def _check_rows(width: int) -> None:
    tokens, per_token = 9, 3
    rows = sort_by_expert(torch.rand(tokens, 5).argsort(-1)[:, :per_token], 5)[1]
    hidden, spread = torch.randn(tokens, width), torch.randn(tokens * per_token, width)
    beside, logits, gate = torch.randn(tokens, width), torch.randn(tokens, 1), torch.randn(width)
    for name, arguments in {
        "spread_rows": (hidden, rows),
        "spread_rows_beside": (hidden, rows, beside, logits),
        "sum_rows": (spread, rows),
        "sum_rows_beside": (spread, rows, beside, logits),
        "sum_rows_and": (spread, rows, beside, logits, gate),
    }.items():
        _check_same(triton_kernels, expert_rows, name, arguments)


def _check_norms(width: int) -> None:
    epsilon = 1e-6
    triton_norms._PROGRAMS, triton_norms._ELEMENTS = 2, 64  # so that each has several blocks
    for rows in (1, 200):
        weight, x = torch.randn(width), torch.randn(rows, width)
        heads = torch.randn(rows, 3, width)
        gate = torch.randn(rows, 5 * width)[:, width : 4 * width].unflatten(-1, (3, width))
        _check_same(triton_norms, norm, "rms_norm", (x, weight, epsilon))
        _check_same(triton_norms, norm, "zero_centered_rms_norm", (x, weight, epsilon))
        _check_same(triton_norms, gated_delta_net, "gated_rms_norm", (heads, gate, weight, epsilon))
        logits = 20 * torch.randn(rows, 4 * width)
        columns = logits[:, :width], logits[:, width : 2 * width]
        _check_same(triton_norms, gated_delta_net, "gates", (*columns, torch.randn(width), torch.randn(width)))


def _check_same(kernels: ModuleType, plain: ModuleType, name: str, arguments: tuple[Any, ...]) -> None:
    """The kernel's values are those of the plain function, and where the kernel has gradients, they are too."""

    def run(function: Callable[..., Any]) -> list[torch.Tensor]:
        leaves = [one.detach().requires_grad_(one.is_floating_point()) for one in tensors]
        found = function(*leaves, *others)
        outputs = [found] if torch.is_tensor(found) else list(found)
        if kernels is not triton_norms:
            return [one.detach() for one in outputs]
        return [*outputs, *torch.autograd.grad(outputs, leaves, upstream[: len(outputs)])]

    tensors = [one for one in arguments if torch.is_tensor(one)]
    others = [one for one in arguments if not torch.is_tensor(one)]
    upstream = [torch.randn_like(tensors[0]), torch.randn_like(tensors[0])]
    for one, right in zip(run(getattr(kernels, name)), run(getattr(plain, name)), strict=True):
        torch.testing.assert_close(one, right, atol=1e-5, rtol=1e-4)


def _check_swiglu() -> None:
    gate_up, weights, direction = torch.randn(7, 96), torch.rand(7, 1), torch.randn(7, 48)
    torch.testing.assert_close(triton_kernels.product_of(gate_up), swiglu.product_of(gate_up))
    found = triton_kernels.weighted_product_of(gate_up, weights)
    torch.testing.assert_close(found, swiglu.weighted_product_of(gate_up, weights))
    leaves = [one.requires_grad_() for one in (gate_up, weights)]
    wanted = torch.autograd.grad(swiglu.weighted_product_of(*leaves), leaves, direction)
    for one, right in zip(swiglu_gradient(direction, gate_up.detach(), weights.detach()), wanted, strict=True):
        torch.testing.assert_close(one, right)
    (right,) = torch.autograd.grad(swiglu.product_of(gate_up), gate_up, direction)
    torch.testing.assert_close(swiglu_gradient(direction, gate_up.detach(), None)[0], right)


def _check_logits(columns: int) -> None:
    """Of rows whose target is here and elsewhere, with a temperature each and without, columns in several blocks."""
    triton_logits._COLUMNS = 32
    rows = 9
    here = (torch.arange(rows) % 3 > 0).float()
    chosen = logits.Chosen(torch.randint(0, columns, (rows,)), here)
    values = torch.linspace(0.3, 30, rows)[:, None].flip(0) * torch.randn(rows, columns)
    values[0, 0], values[1] = 300.0, -300.0
    normalizer, of_logprob, entropy, of_entropy = torch.randn(4, rows).unbind(0)
    for temperatures in (None, 0.5 + torch.rand(rows)):
        tempered = values if temperatures is None else values / temperatures[:, None]
        total = tempered.logsumexp(-1) + normalizer.abs()  # other ranks have more
        found = triton_logits.softmax_parts(values.clone(), chosen, temperatures, True)
        wanted = logits.softmax_parts(values.clone(), chosen, temperatures, True)
        torch.testing.assert_close(tuple(found), tuple(wanted), atol=1e-4, rtol=1e-5)
        for with_entropy in (None, (entropy, of_entropy)):
            arguments = (total, chosen, of_logprob, with_entropy, temperatures)
            found = triton_logits.logit_gradient(values.clone(), *arguments)
            torch.testing.assert_close(found, logits.logit_gradient(values.clone(), *arguments), atol=1e-5, rtol=1e-4)


if __name__ == "__main__":
    main()
