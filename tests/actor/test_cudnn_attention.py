"""A piece of a sequence attends to all before it, by a kernel of squares and rectangles; cuDNN itself: tests/gpu."""

import pytest
import torch

from actor.layers import cudnn_attention
from actor.layers.cudnn_attention import Cut, Part, long_parts, rounded_length

SCALE = 0.3


class OnCpu:
    """torch's kernel for CPUs, which gives the sums, too."""

    def forward(self, query, key, value, is_causal, scale):
        keys, values = (one.repeat_interleave(query.shape[1] // key.shape[1], 1) for one in (key, value))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, is_causal, scale=scale
        )

    def backward(self, gradient, inputs, out, log_sums, is_causal, scale):
        query, key, value = inputs
        share = query.shape[1] // key.shape[1]
        keys, values = (one.repeat_interleave(share, 1) for one in (key, value))
        of_query, *others = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, keys, values, out, log_sums, 0.0, is_causal, scale=scale
        )
        return of_query, *(one.unflatten(1, (-1, share)).sum(2) for one in others)


def plain(query, key, value):
    share = query.shape[1] // key.shape[1]
    keys, values = (one.repeat_interleave(share, 1) for one in (key, value))
    scores = torch.einsum("thd,shd->hts", query, keys) * SCALE
    sees = torch.arange(len(key)) <= torch.arange(len(query))[:, None] + len(key) - len(query)
    return torch.einsum("hts,shd->thd", scores.masked_fill(~sees, -torch.inf).softmax(-1), values)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (64, 128), (50, 333), (100, 101), (129, 1000), (1, 70)])
def test_values_and_gradients_of_a_piece_are_those_of_plain_attention(queries, keys, monkeypatch):
    monkeypatch.setattr(cudnn_attention, "_MERGED_ROWS", 48)
    torch.manual_seed(queries)
    inputs = [torch.randn(*shape, 16) for shape in ((queries, 4), (keys, 2), (keys, 2))]
    upstream = torch.randn(queries, 4, 16)

    def run(attend, dtype):
        leaves = [one.to(dtype).requires_grad_() for one in inputs]
        out = attend(*leaves)
        return [out, *torch.autograd.grad((out * upstream.to(dtype)).sum(), leaves)]

    whole = [Part(slice(0, queries), slice(0, keys))]
    found = run(lambda *leaves: long_parts(*leaves, whole, [], SCALE, OnCpu()), torch.float32)
    _assert_equal(found, run(plain, torch.float64))


def _assert_equal(found, expected):
    for name, one, right in zip(("out", "query", "key", "value"), found, expected, strict=True):
        assert torch.allclose(one.double(), right, rtol=1e-4, atol=1e-5), name


# Rows of queries and of keys, and whether their attention comes from elsewhere.
PACKS = {
    "two sequences": [(70, 70, False), (45, 45, False)],
    "a short one between": [(70, 70, False), (9, 9, True), (64, 64, False)],
    "pieces": [(40, 90, False), (7, 30, True), (33, 333, False), (5, 5, True)],
}


@pytest.mark.parametrize("pack", PACKS)
def test_parts_of_a_pack_lie_beside_what_others_have(pack):
    """The last rows belong to nobody, as those that fill a pack up."""
    torch.manual_seed(0)
    lengths = [row[:2] for row in PACKS[pack]]
    ends = [[sum(column[:count]) for count in range(len(column) + 1)] for column in zip(*lengths, strict=True)]
    rows = [Part(*(slice(of[i], of[i + 1]) for of in ends)) for i in range(len(lengths))]
    elsewhere = [row[2] for row in PACKS[pack]]
    inputs = [torch.randn(*shape, 16) for shape in ((ends[0][-1] + 3, 4), (ends[1][-1] + 3, 2), (ends[1][-1] + 3, 2))]
    upstream = torch.randn(ends[0][-1], 4, 16)

    def one_by_one(query, key, value, chosen):
        return [plain(query[part.queries], key[part.keys], value[part.keys]) for part in chosen]

    def run(attend, dtype):
        leaves = [one.to(dtype).requires_grad_() for one in inputs]
        out = attend(*leaves)[: len(upstream)]
        return [out, *torch.autograd.grad((out * upstream.to(dtype)).sum(), leaves)]

    def long_ones_apart(*leaves):
        parts = [part for part, other in zip(rows, elsewhere, strict=True) if not other]
        others = [part for part, other in zip(rows, elsewhere, strict=True) if other]
        found = zip((part.queries for part in others), one_by_one(*leaves, others), strict=True)
        return long_parts(*leaves, parts, list(found), SCALE, OnCpu())

    expected = run(lambda *leaves: torch.cat(one_by_one(*leaves, rows)), torch.float64)
    _assert_equal(run(long_ones_apart, torch.float32), expected)


def test_nothing_is_kept_but_inputs_result_and_sums():
    """Of lengths that are filled up, and of keys that four queries share: what is made of them stays in no layer."""
    query, key, value = (torch.randn(2 * 4500, heads, 8, requires_grad=True) for heads in (8, 2, 2))
    parts = [Part(slice(0, 4500), slice(0, 4500)), Part(slice(4500, 9000), slice(4500, 9000))]
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = long_parts(query, key, value, parts, [], SCALE, OnCpu())
    sums = 2 * rounded_length(4500) * 8 * 4
    assert sum(kept.values()) == sum(one.nbytes for one in (query, key, value, out)) + sums


def test_keys_are_cut_at_few_places_and_little_overlaps():
    cuts = [Cut.of(4096, 4096 + start) for start in range(4096, 8192)]
    assert len({cut.before for cut in cuts}) == 4
    assert max(cut.overlap for cut in cuts) < 1024
    assert Cut.of(10, 10) == Cut(0, 0)
