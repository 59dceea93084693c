"""How packs are divided among attention kernels; what these compute is tested where they run (tests/gpu)."""

from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actor.layers.causal_attention import (
    Heads,
    LongShapes,
    Segments,
    causal_attention,
    long_lengths,
    on_backward_thread,
    segment_runs,
)
from actor.layers.cudnn_attention import Cut, rounded_length

LENGTHS = st.lists(st.one_of(st.integers(0, 300), st.integers(2900, 9000)), min_size=1, max_size=20)


def _ends(lengths: list[int]) -> tuple[int, ...]:
    return tuple(sum(lengths[:count]) for count in range(len(lengths) + 1))


def test_long_segments_are_runs_of_their_own_and_short_ones_stay_together():
    lengths = [10, 2999, 3000, 5000, 0, 3]
    assert segment_runs(_ends(lengths)) == [(0, 2), (2, 3), (3, 4), (4, 6)]


@given(LENGTHS)
def test_runs_cover_every_segment_once_in_order(lengths):
    runs = segment_runs(_ends(lengths))
    assert [segment for first, last in runs for segment in range(first, last)] == list(range(len(lengths)))
    short = [max(lengths[first:last]) < 3000 for first, last in runs]
    assert not any(one and other for one, other in pairwise(short))
    assert all(last - first == 1 for (first, last), one in zip(runs, short, strict=True) if not one)


@pytest.mark.parametrize("lengths", [[7], [3, 1, 40, 0, 33, 5, 64, 1], [2] * 9])
def test_segments_padded_to_one_length_attend_as_each_alone(lengths):
    generator = torch.Generator().manual_seed(0)
    tokens, heads, groups, channels = sum(lengths), 4, 2, 16
    inputs = [
        torch.randn(tokens, count, channels, generator=generator, requires_grad=True)
        for count in (heads, groups, groups)
    ]
    gradient = torch.randn(tokens, heads, channels, generator=generator)
    segments = Segments(_ends(lengths), torch.tensor(_ends(lengths), dtype=torch.int32))
    attended = causal_attention(*inputs, segments, segments, channels**-0.5)
    found = torch.autograd.grad(attended, inputs, gradient)

    wide = [one.detach().double().requires_grad_() for one in inputs]
    alone = torch.cat([_attended_alone(*parts) for parts in zip(*(one.split(lengths) for one in wide), strict=True)])
    expected = torch.autograd.grad(alone, wide, gradient.double())
    torch.testing.assert_close(attended.double(), alone, atol=2e-6, rtol=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


def _attended_alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """By the definition, head by head."""
    key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], 1) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    later = torch.ones(len(query), len(key)).triu(1).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), value)


@given(st.integers(1, 300_000))
def test_rounded_lengths_are_few_and_near(tokens):
    rounded = rounded_length(tokens)
    assert tokens <= rounded <= tokens * 17 / 16 + 1
    assert rounded_length(rounded) == rounded


def test_an_octave_has_sixteen_lengths():
    assert len({rounded_length(tokens) for tokens in range(4097, 8193)}) == 16


@given(st.integers(3000, 40_000))
def test_every_long_sequence_meets_a_length_that_was_planned(tokens):
    assert rounded_length(tokens) in long_lengths(40_000)


@given(st.integers(12_000, 70_000), st.sampled_from([(2, 0), (2, 1), (4, 2)]))
def test_every_long_piece_meets_shapes_that_were_planned(sequence_tokens, group):
    size, rank = group
    shapes, piece = _planned(size, rank), sequence_tokens // (2 * size)
    if piece < 3000:
        return
    for earlier in (rank, 2 * size - 1 - rank):
        cut = Cut.of(piece, (earlier + 1) * piece)
        assert cut.before + cut.overlap == earlier * piece and 4 * cut.overlap <= earlier * piece
        assert rounded_length(piece + cut.overlap) in shapes.squares
        assert not cut.before or (rounded_length(piece), cut.before) in shapes.rectangles


@cache
def _planned(size: int, rank: int) -> LongShapes:
    return LongShapes.of(70_000, size, rank)


def test_pieces_have_few_shapes():
    shapes = LongShapes.of(32_768, 2, 1)
    assert len(shapes.squares) < 60 and len(shapes.rectangles) < 110
    assert LongShapes.of(11_000, 2, 1) == LongShapes(()) == LongShapes.of(2_000, 1, 0)


def test_lengths_are_planned_up_to_the_longest_sequence_only():
    assert long_lengths(2999) == []
    assert long_lengths(3000) == [3072]
    assert long_lengths(4300)[-2:] == [4096, 4352]


def test_planning_takes_what_its_tensors_take():
    heads = Heads.of_rank(16, 2, 256, tensor_parallel=4, dtype=torch.bfloat16)
    assert (heads.queries, heads.key_values) == (4, 1)
    q, k = torch.zeros(100, 4, 256, dtype=torch.bfloat16), torch.zeros(100, 1, 256, dtype=torch.bfloat16)
    assert heads.planning_bytes(100) == 4 * (q.nbytes + k.nbytes) + q.float().nbytes


def test_work_runs_where_backward_passes_run_and_fails_there():
    seen = []
    with torch.no_grad():
        on_backward_thread(torch.device("cpu"), lambda: seen.append(torch.is_grad_enabled()))
    assert seen == [False]
    with pytest.raises(ValueError, match="no plan"):
        on_backward_thread(torch.device("cpu"), _fail)


def _fail() -> None:
    raise ValueError("no plan")
