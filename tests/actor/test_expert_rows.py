"""Rows go to their experts and come back summed, and gradients go the other way."""

import pytest
import torch

from actor.layers.expert_rows import (
    ReorderedRows,
    SpreadRows,
    SpreadRowsBeside,
    SumRows,
    SumRowsBeside,
    arrivals_by_expert,
    sort_by_expert,
)
from actor.layers.router import Logits, NormalizedChoice

TOKENS, EXPERTS, PER_TOKEN = 9, 5, 3


def _chosen() -> torch.Tensor:
    return torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0)).argsort(-1)[:, :PER_TOKEN]


def test_rows_are_sorted_by_expert_and_then_by_token():
    chosen = _chosen()
    order, rows, counts = sort_by_expert(chosen, EXPERTS + 1)
    pairs = [(int(chosen.flatten()[choice]), int(choice) // PER_TOKEN) for choice in order]
    assert pairs == sorted(pairs)
    assert torch.equal(counts, torch.bincount(chosen.flatten(), minlength=EXPERTS + 1))
    assert torch.equal(order[rows.flatten()], torch.arange(TOKENS * PER_TOKEN))


def test_spreading_and_summing_are_each_others_gradients():
    order, rows, _ = sort_by_expert(_chosen(), EXPERTS)
    tokens = torch.randn(TOKENS, 4, dtype=torch.float64, requires_grad=True)
    spread = SpreadRows.apply(tokens, rows)
    assert torch.equal(spread, tokens[order // PER_TOKEN])
    summed = SumRows.apply(spread, rows)
    torch.testing.assert_close(summed, PER_TOKEN * tokens, atol=1e-6, rtol=1e-6)  # summed in float32
    weights = torch.randn(TOKENS, 4, dtype=torch.float64)
    (summed * weights).sum().backward()
    torch.testing.assert_close(tokens.grad, PER_TOKEN * weights, atol=1e-6, rtol=1e-6)


def test_the_expert_of_every_token_joins_the_sum_with_its_gate():
    _, rows, _ = sort_by_expert(_chosen(), EXPERTS)
    generator = torch.Generator().manual_seed(1)
    shapes = ((TOKENS * PER_TOKEN, 4), (TOKENS, 4), (TOKENS, 1))
    routed, shared, logits = inputs = [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]
    found = SumRowsBeside.apply(routed, rows, shared, logits)
    wanted = routed[rows].sum(1) + shared * logits.sigmoid()
    torch.testing.assert_close(found, wanted)
    weights = torch.randn(TOKENS, 4, generator=generator)
    pairs = zip(*(torch.autograd.grad((one * weights).sum(), inputs) for one in (found, wanted)), strict=True)
    for gradient, right in pairs:
        torch.testing.assert_close(gradient, right)


def test_hidden_states_pass_router_experts_and_the_expert_of_every_token_with_the_gradients_of_all():
    _, rows, _ = sort_by_expert(_chosen(), EXPERTS)
    generator = torch.Generator().manual_seed(3)
    shapes = ((TOKENS, 4), (EXPERTS, 4), (1, 4))
    inputs = [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]

    def chained(tokens, router, gate):
        scores, tokens = Logits.apply(tokens, router)
        spread, tokens, logits = SpreadRowsBeside.apply(tokens, rows, gate)
        return scores, spread, tokens, logits

    def plain(tokens, router, gate):
        places = rows.flatten().argsort() // PER_TOKEN
        return tokens @ router.t(), tokens[places], tokens * 1.0, tokens @ gate.t()

    found, wanted = chained(*inputs), plain(*inputs)
    upstream = [torch.randn(one.shape, generator=generator) for one in wanted]
    gradients = [torch.autograd.grad(outputs, inputs, upstream) for outputs in (found, wanted)]
    for one, right in zip((*found, *gradients[0]), (*wanted, *gradients[1]), strict=True):
        torch.testing.assert_close(one, right)


def test_the_weights_of_chosen_experts_are_the_normalized_softmax_over_all():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator).requires_grad_()
    weights, chosen = NormalizedChoice.apply(logits, PER_TOKEN)
    highest, wanted = logits.softmax(-1).topk(PER_TOKEN)
    right = highest / highest.sum(-1, keepdim=True)
    assert torch.equal(chosen, wanted)
    torch.testing.assert_close(weights, right)
    upstream = torch.randn(TOKENS, PER_TOKEN, generator=generator)
    gradients = [torch.autograd.grad((one * upstream).sum(), logits)[0] for one in (weights, right)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "counts", [[[2, 0, 3], [1, 4, 0]], [[0, 0], [0, 0]], [[0, 2, 1, 5], [3, 0, 0, 1], [2, 2, 2, 2]]]
)
def test_rows_of_several_ranks_are_sorted_by_expert_and_go_back_as_they_came(counts):
    amounts = torch.tensor(counts)
    ranks, experts = amounts.shape
    labels = [
        (expert, rank, index)
        for rank in range(ranks)
        for expert in range(experts)
        for index in range(amounts[rank, expert])
    ]
    order, places = arrivals_by_expert(amounts, len(labels))
    assert [labels[arrival] for arrival in order] == sorted(labels)
    rows = torch.randn(len(labels), 3, requires_grad=True)
    sorted_rows = ReorderedRows.apply(rows, order, places)
    assert torch.equal(sorted_rows, rows[order])
    assert torch.equal(ReorderedRows.apply(sorted_rows, places, order), rows)
    gradient = torch.randn_like(sorted_rows)
    sorted_rows.backward(gradient)
    assert rows.grad is not None and torch.equal(rows.grad[order], gradient)
