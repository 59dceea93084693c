"""Lengths from `cu_seqlens`: the cases of Megatron-Bridge's pull request 3839, and the traps of its code."""

import pytest

from rlpipe.flops import Convention, Grid, batch_lengths, model_flops, sequence_cost
from rlpipe.model.model_reader import describe_model


def _squares(lengths):
    return sum(length**2 for length in lengths)


def test_without_cu_seqlens_each_row_is_a_sequence():
    assert batch_lengths(3, 16) == (16, 16, 16)


def test_cu_seqlens_give_the_sequences():
    assert batch_lengths(1, 9, cu_seqlens=[[0, 5, 9]]) == (5, 4)


def test_filling_is_cut():
    assert batch_lengths(1, 16, cu_seqlens=[[0, 5, 9, -1, -1]]) == (5, 4)


def test_without_filling_nothing_is_cut():
    """Taking the position of the smallest entry as the end would cut a list without filling down to nothing."""
    assert _squares(batch_lengths(1, 10, cu_seqlens=[[0, 5, 9]])) == 41


def test_unpadded_ends_are_preferred():
    lengths = batch_lengths(1, 16, cu_seqlens=[[0, 8, 16]], cu_seqlens_unpadded=[[0, 5, 9]])
    assert lengths == (5, 4)


def test_unusable_unpadded_ends_yield_to_the_padded_ones():
    assert batch_lengths(1, 16, cu_seqlens=[[0, 8, 16]], cu_seqlens_unpadded=[[]]) == (8, 8)


def test_micro_batches_add():
    shape = describe_model("Qwen3-8B").shape
    first, second = batch_lengths(1, 9, cu_seqlens=[[0, 5, 9]]), batch_lengths(2, 7)
    assert model_flops(shape, first) + model_flops(shape, second) == model_flops(shape, first + second)


def test_no_tokens_no_lengths():
    assert batch_lengths(0, 16) == batch_lengths(2, 0) == ()


def test_image_and_video_grids_add():
    shape, image, video = describe_model("Qwen3.5-35B-A3B").shape, Grid(1, 4, 6), Grid(3, 4, 4)
    both = model_flops(shape, [8], grids=[image, video])
    assert both == model_flops(shape, [8], grids=[image]) + model_flops(shape, [], grids=[video])


def test_grids_need_a_vision_tower():
    with pytest.raises(ValueError, match="without a vision tower"):
        model_flops(describe_model("Qwen3-8B").shape, [8], grids=[Grid(1, 4, 4)])


@pytest.mark.parametrize("ends", [[], [0], [0, 0], [-1, -1]])
def test_an_empty_list_falls_back_to_the_row(ends):
    assert batch_lengths(1, 16, cu_seqlens=[ends]) == (16,)


def test_32_samples_in_a_pack_attend_32_times_less():
    packed = batch_lengths(1, 8192, cu_seqlens=[list(range(0, 8193, 256))])
    quadratic = sequence_cost(describe_model("Qwen3-8B").shape).quadratic
    assert quadratic * _squares(batch_lengths(1, 8192)) == 32 * quadratic * _squares(packed)


def test_rows_are_not_compared_with_each_other():
    assert batch_lengths(2, 9, cu_seqlens=[[0, 5, 9], [0, 2, 9]]) == (5, 4, 2, 7)


def test_a_row_without_list_beside_one_with():
    assert batch_lengths(2, 9, cu_seqlens=[[0, 5, 9], []]) == (5, 4, 9)


def test_a_padded_tail_is_no_sequence():
    ends = [[0, 5, 9, 16]]
    assert batch_lengths(1, 16, cu_seqlens=ends) == (5, 4, 7)
    assert batch_lengths(1, 16, cu_seqlens=ends, real_tokens=[9]) == (5, 4)


def test_both_terms_count_the_same_tokens():
    breakdown = model_flops(describe_model("Qwen3-8B").shape, batch_lengths(1, 16, cu_seqlens=[[0, 5, 9, -1]]))
    assert breakdown.tokens == 9


@pytest.mark.parametrize(
    ("rows", "ends", "message"),
    [(1, [[1, 5]], "starts at 1"), (1, [[0, 5, 3]], "decreases"), (2, [[0, 5]], "2 rows, but cu_seqlens for 1")],
)
def test_nonsense_is_refused(rows, ends, message):
    with pytest.raises(ValueError, match=message):
        batch_lengths(rows, 16, cu_seqlens=ends)


def test_negative_lengths_are_refused():
    with pytest.raises(ValueError, match="-3 tokens"):
        model_flops(describe_model("Qwen3-8B").shape, [4, -3], Convention.FULL)
