"""Run with TRITON_INTERPRET=1: Triton's interpreter computes the actor's kernels on a CPU, beside plain torch."""

from collections.abc import Callable, Sequence

import torch

from actor.layers.expert_rows import sort_by_expert, spread_rows
from actor.layers.gdn_inputs import ProjectedHeads
from actor.layers.gdn_torch import projected_heads
from actor.layers.packed import PackedSequences
from actor.layers.swiglu import product_of, weighted_product_of
from actor.layers.triton_kernels import choose, spread, swiglu_gradient

PACKS = {(0, 1, 3, 10, 64, 124, 128, 131): (16, 8), (0, 140): (8, 12)}
KEY_HEADS, VALUE_HEADS = 2, 4


def main() -> None:
    torch.manual_seed(0)
    for ends, channels in PACKS.items():
        _check_heads(ends, channels)
    for experts in (5, 60):
        _check_broken_choices(experts)
    _check_rows()
    _check_swiglu()


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


def _check_rows() -> None:
    rows = sort_by_expert(torch.rand(9, 5).argsort(-1)[:, :3], 5)[1]
    tokens = torch.randn(9, 48)
    assert torch.equal(spread(tokens, rows), spread_rows(tokens, rows))


def _check_swiglu() -> None:
    gate_up, weights, direction = torch.randn(7, 96), torch.rand(7, 1), torch.randn(7, 48)
    leaves = [one.requires_grad_() for one in (gate_up, weights)]
    wanted = torch.autograd.grad(weighted_product_of(*leaves), leaves, direction)
    for one, right in zip(swiglu_gradient(direction, gate_up.detach(), weights.detach()), wanted, strict=True):
        torch.testing.assert_close(one, right)
    (right,) = torch.autograd.grad(product_of(gate_up), gate_up, direction)
    torch.testing.assert_close(swiglu_gradient(direction, gate_up.detach(), None)[0], right)


if __name__ == "__main__":
    main()
