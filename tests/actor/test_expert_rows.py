"""Rows go to their experts and come back summed, and gradients go the other way."""

import torch

from actor.layers.expert_rows import SpreadRows, SumRows, sort_by_expert

TOKENS, EXPERTS, PER_TOKEN = 9, 5, 3


def _chosen() -> torch.Tensor:
    return torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0)).argsort(-1)[:, :PER_TOKEN]


def test_rows_are_sorted_by_expert_and_then_by_token():
    chosen = _chosen()
    order, rows = sort_by_expert(chosen)
    pairs = [(int(chosen.flatten()[choice]), int(choice) // PER_TOKEN) for choice in order]
    assert pairs == sorted(pairs)
    assert torch.equal(order[rows.flatten()], torch.arange(TOKENS * PER_TOKEN))


def test_spreading_and_summing_are_each_others_gradients():
    order, rows = sort_by_expert(_chosen())
    tokens = torch.randn(TOKENS, 4, dtype=torch.float64, requires_grad=True)
    spread = SpreadRows.apply(tokens, order, rows)
    assert torch.equal(spread, tokens[order // PER_TOKEN])
    summed = SumRows.apply(spread, order, rows)
    torch.testing.assert_close(summed, PER_TOKEN * tokens, atol=1e-6, rtol=1e-6)  # summed in float32
    weights = torch.randn(TOKENS, 4, dtype=torch.float64)
    (summed * weights).sum().backward()
    torch.testing.assert_close(tokens.grad, PER_TOKEN * weights, atol=1e-6, rtol=1e-6)
