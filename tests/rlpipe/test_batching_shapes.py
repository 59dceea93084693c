"""Classes of pack shapes: what the warm-up runs, and length buckets."""

import numpy as np
import pytest
from test_batching_packs import sample_of

from rlpipe.batching import PackLimits, pack_for_training
from rlpipe.batching.shape_classes import shape_class_packs
from rlpipe.config.actor import ActorConfig


def test_warm_up_packs_have_one_two_three_and_many_sequences_and_every_length_class():
    packs = shape_class_packs(PackLimits(budget_tokens=16384), vocabulary=50, longest_tokens=4096)[:7]
    assert [len(pack.sample_ids) for pack in packs] == [16, 16, 16, 16, 1, 2, 3]
    assert [pack.padded_tokens for pack in packs] == [16384, 8192, 4096, 2048, 2048, 2048, 2046]
    assert len(np.unique(packs[0].token_ids)) == 50
    for pack in packs:
        assert pack.loss_weights.sum() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(
    ("budget", "longest", "long"),
    [(16896, 8448, [8448]), (33792, 8448, 3 * [8448]), (8448, 8448, [7920]), (16384, 1500, 10 * [1500]), (16, 9, [])],
)
@pytest.mark.parametrize("multiple", [1, 4])
def test_the_largest_warm_up_pack_is_filled_by_the_longest_sequences(budget, longest, long, multiple):
    """As the packs of a run are, whose passes keep other tensors of long sequences than of short ones."""
    largest = shape_class_packs(PackLimits(budget, multiple, multiple), vocabulary=10, longest_tokens=longest)[0]
    lengths = [int(length) for length in np.diff(largest.cu_seqlens_padded)]
    assert [length for length in lengths if length > max(budget // 16, multiple)] == long
    assert sum(lengths) == budget
    assert len(lengths) == min(16, budget // multiple)


@pytest.mark.parametrize(
    ("budget", "small"), [(16384, [768, 767, 48, 47]), (1000, [768, 767, 48, 47]), (700, [48, 47])]
)
def test_the_warm_up_ends_with_small_packs_such_as_an_update_may_be_left_with(budget, small):
    packs = shape_class_packs(PackLimits(budget), vocabulary=10, longest_tokens=4096)
    assert [pack.padded_tokens for pack in packs if len(pack.sample_ids) == 1][1:] == small


@pytest.mark.parametrize("budget", [8, 48, 8192])
def test_warm_up_packs_fit_the_layout(budget):
    limits = PackLimits(budget, sequence_multiple=4, pack_multiple=8)
    packs = shape_class_packs(limits, vocabulary=10, longest_tokens=4096)
    assert {len(pack.sample_ids) for pack in packs} >= {1, 2}
    for pack in packs:
        assert 0 < pack.padded_tokens <= budget
        assert pack.padded_tokens % 8 == 0
        assert all(length % 4 == 0 for length in np.diff(pack.cu_seqlens_padded))


@pytest.mark.parametrize("multiple", [1, 2, 8])
@pytest.mark.parametrize("budget", [33792, 16384, 4096, 96])
def test_warm_up_packs_have_totals_that_are_and_are_not_multiples_of_16(budget, multiple):
    packs = shape_class_packs(PackLimits(budget, multiple, multiple), vocabulary=10, longest_tokens=4096)
    assert {pack.padded_tokens % 16 == 0 for pack in packs} == {True, False}


def test_warm_up_packs_are_even_where_all_packs_are():
    packs = shape_class_packs(PackLimits(4096, pack_multiple=64), vocabulary=10, longest_tokens=4096)
    assert all(pack.padded_tokens % 64 == 0 for pack in packs)


def test_packs_are_padded_to_buckets_of_length():
    actor = ActorConfig(max_tokens_per_gpu=100, pack_bucket_tokens=32, processes=2, parallel={"context": 2})
    limits = PackLimits.training(actor)
    assert (limits.pack_multiple, limits.capacity_tokens) == (32, 192)
    samples = [sample_of(str(index), "1", 3, length) for index, length in enumerate((50, 9, 30, 7))]
    packs = pack_for_training(samples, limits, data_parallel=1, aggregation="token_mean", norm_tokens=1)
    lengths = {pack.padded_tokens for step in packs.ranks[0] for pack in step}
    assert lengths == {128}
