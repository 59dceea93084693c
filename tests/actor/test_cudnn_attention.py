"""A piece of a sequence attends to all before it, by a kernel of squares and rectangles; cuDNN itself: tests/gpu."""

import pytest
import torch

from actor.layers import cudnn_attention
from actor.layers.cudnn_attention import Cut, long_piece

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

    found = run(lambda *leaves: long_piece(*leaves, SCALE, OnCpu()), torch.float32)
    for name, one, right in zip(("out", "query", "key", "value"), found, run(plain, torch.float64), strict=True):
        assert torch.allclose(one.double(), right, rtol=1e-4, atol=1e-5), name


def test_keys_are_cut_at_few_places_and_little_overlaps():
    cuts = [Cut.of(4096, 4096 + start) for start in range(4096, 8192)]
    assert len({cut.before for cut in cuts}) == 4
    assert max(cut.overlap for cut in cuts) < 1024
    assert Cut.of(10, 10) == Cut(0, 0)
