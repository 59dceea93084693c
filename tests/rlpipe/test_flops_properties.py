"""Laws that hold for every model, batch and layout."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actor.hf.weight_table import export_plan
from rlpipe.flops import (
    Convention,
    model_flops,
    sequence_cost,
    weight_gradient_flops,
)
from rlpipe.flops.convention import doubled_pairs
from rlpipe.model.model_reader import describe_model, trainable_model

WINDOWED = describe_model(
    {
        "model_type": "mistral",
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "sliding_window": 37,
        "num_nextn_predict_layers": 1,
    }
).shape
SHAPES = {name: describe_model(name).shape for name in ("Qwen3-8B", "Qwen3-30B-A3B", "Qwen3.5-35B-A3B")} | {
    "w": WINDOWED
}

shapes = st.sampled_from(list(SHAPES.values()))
conventions = st.sampled_from(list(Convention))
batches = st.lists(st.integers(0, 5000), max_size=12)


@given(shapes, batches, conventions, st.integers(1, 5), st.randoms())
def test_totals_do_not_depend_on_the_layout(shape, lengths, convention, ranks, random):
    """However sequences are dealt to data-parallel ranks and in which order, the sum over the ranks is the same."""
    whole = model_flops(shape, lengths, convention)
    dealt = [[] for _ in range(ranks)]
    for length in random.sample(lengths, len(lengths)):
        random.choice(dealt).append(length)
    total = model_flops(shape, [], convention)
    for part in dealt:
        total = total + model_flops(shape, part, convention)
    assert total == whole


@given(shapes, batches, conventions, st.booleans())
def test_costs_of_sequences_add_up_to_the_batch(shape, lengths, convention, include_mtp):
    cost = sequence_cost(shape, convention, include_mtp=include_mtp)
    breakdown = model_flops(shape, lengths, convention, include_mtp=include_mtp)
    assert sum(map(cost, lengths)) == breakdown.forward
    assert sum(breakdown.per_layer_type.values()) == breakdown.forward == breakdown.train // 3
    assert breakdown.tokens == sum(lengths)


@given(shapes, st.integers(1, 100_000))
def test_conventions_are_ordered(shape, length):
    half, exact, full = (sequence_cost(shape, convention)(length) for convention in Convention)
    assert half < exact <= full
    assert (exact == full) == (length == 1)


@given(shapes, st.integers(1, 5000), st.integers(1, 5000), conventions)
def test_two_sequences_cost_less_than_their_concatenation(shape, first, second, convention):
    cost = sequence_cost(shape, convention)
    assert cost(first) + cost(second) < cost(first + second)


@given(st.integers(0, 60), st.integers(1, 70))
def test_exact_pairs_are_those_of_a_mask(length, window):
    visible = sum(1 for query in range(length) for key in range(query + 1) if query - key < window)
    assert doubled_pairs(length, Convention.CAUSAL_EXACT, window) == 2 * visible
    assert doubled_pairs(length, Convention.FULL, window) == 2 * length**2


@given(st.integers(0, 5000), st.integers(1, 5000))
def test_half_differs_from_exact_by_the_diagonal(length, window):
    exact, half = (doubled_pairs(length, c, window) for c in (Convention.CAUSAL_EXACT, Convention.CAUSAL_HALF))
    assert exact - half == min(length, window)


def test_delta_net_layers_are_linear():
    """30 of the hybrid's 40 layers add nothing to the quadratic term."""
    hybrid = SHAPES["Qwen3.5-35B-A3B"]
    assert sequence_cost(hybrid).quadratic == 10 * 16 * 2 * 256


def test_breakdowns_travel_between_processes():
    breakdown = model_flops(WINDOWED, [5, 7])
    assert pickle.loads(pickle.dumps(breakdown)) == breakdown
    cost = sequence_cost(WINDOWED)
    assert pickle.loads(pickle.dumps(cost))(7) == cost(7)


def test_different_conventions_do_not_add():
    with pytest.raises(ValueError, match="causal_half and as full"):
        model_flops(WINDOWED, [5]) + model_flops(WINDOWED, [5], Convention.FULL)


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B", "Qwen3.5-35B-A3B"])
def test_gradients_of_all_weights_cost_as_much_as_all_products_with_weights(name):
    """Counted tensor by tensor on one side, layer by layer on the other."""
    shape, model = describe_model(name).shape, trainable_model(f"configs/models/{name}")
    weights = [(tensor.name, tensor.shape) for tensor in export_plan(model)]
    products = sum(part.weights for _, part in model_flops(shape, [1], include_mtp=False).parts)
    assert weight_gradient_flops(shape, weights, tied=model.tied_embeddings) == products
    head = [weight for weight in weights if "lm_head" in weight[0] or "embed_tokens" in weight[0]]
    assert weight_gradient_flops(shape, head, tied=False) == shape.head_flops
    assert weight_gradient_flops(shape, head[:1], tied=True) == shape.head_flops
