"""Bins, plans and the budget advisor: hard capacity, equal counts, even cost, on lengths alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.batching import PackLimits, advise_budget, cost_per_length, plan_packs, report_on
from rlpipe.batching.balance import trade_sequences
from rlpipe.batching.bins import best_fit_decreasing, deal, level_fit, split_to_count
from rlpipe.shared.errors import ConfigError

sizes_within_50 = st.lists(st.integers(1, 50), min_size=1, max_size=80).map(np.array)


def quadratic(lengths):
    return lengths + lengths.astype(np.float64) ** 2 / 70_000


def plain_best_fit_decreasing(sizes, capacity):
    """The textbook algorithm, by linear search."""
    rooms, bins = [], []
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        open_bins = [b for b in range(len(bins)) if rooms[b] >= sizes[item]]
        if open_bins:
            chosen = min(open_bins, key=lambda b: rooms[b])
        else:
            chosen = len(bins)
            rooms.append(capacity)
            bins.append([])
        rooms[chosen] -= sizes[item]
        bins[chosen].append(item)
    return sorted(sum(int(sizes[i]) for i in items) for items in bins)


@given(sizes=sizes_within_50, capacity=st.integers(50, 140))
def test_best_fit_decreasing_is_the_textbook_algorithm(sizes, capacity):
    bins = best_fit_decreasing(sizes, capacity)
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    assert sorted(int(sizes[items].sum()) for items in bins) == plain_best_fit_decreasing(sizes, capacity)


def test_best_fit_decreasing_by_hand():
    assert best_fit_decreasing(np.array([4, 8, 1, 4, 2, 1]), 10) == [[1, 2, 5], [0, 3, 4]]


@given(sizes=sizes_within_50, capacity=st.integers(50, 140), count=st.integers(1, 40))
def test_level_fit_keeps_the_capacity_or_gives_up(sizes, capacity, count):
    bins = level_fit(sizes, quadratic(sizes), capacity, count)
    if bins is None:
        # It gives up only where every bin lacks room for one item.
        assert sizes.sum() > count * (capacity - sizes.max())
    else:
        assert len(bins) == count
        assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
        assert all(sizes[items].sum() <= capacity for items in bins)


@given(
    sizes=st.one_of(sizes_within_50, st.lists(st.sampled_from([1, 2, 50]), min_size=1).map(np.array)),
    count=st.integers(1, 40),
)
def test_dealing_is_the_level_fit_of_bins_with_room_for_everything(sizes, count):
    dealt = deal(sizes, quadratic(sizes), count)
    assert [items.tolist() for items in dealt] == level_fit(sizes, quadratic(sizes), int(sizes.sum()), count)


@pytest.mark.parametrize(("count", "items"), [(4, [[0], [1], [2], []]), (2, [[0], [1, 2]]), (1, [[0, 1, 2]])])
def test_dealing_by_hand(count, items):
    sizes = np.array([9, 5, 3])
    assert [one.tolist() for one in deal(sizes, sizes.astype(float), count)] == items


@given(sizes=sizes_within_50, more=st.integers(0, 100))
def test_splitting_reaches_the_count_or_single_items(sizes, more):
    bins = best_fit_decreasing(sizes, 60)
    split = split_to_count(bins, sizes.astype(float), len(bins) + more)
    assert len(split) == min(len(bins) + more, len(sizes))
    assert all(split)
    assert sorted(item for items in split for item in items) == list(range(len(sizes)))


@given(
    lengths=st.lists(st.one_of(st.integers(1, 130), st.integers(1, 15)), min_size=1, max_size=120).map(np.array),
    ranks=st.integers(1, 5),
    count_multiple=st.integers(1, 3),
    limits=st.sampled_from([PackLimits(100), PackLimits(103, 4, 8), PackLimits(128, 8, 8), PackLimits(61, 2, 6)]),
)
def test_plans_keep_the_budget_equal_counts_and_every_sequence(lengths, ranks, count_multiple, limits):
    limits = replace(limits, count_multiple=count_multiple)
    plan = plan_packs(lengths, limits, ranks, quadratic)
    packs = [pack for rank in plan.ranks for pack in rank]
    assert sorted([*plan.oversize, *(item for pack in packs for item in pack)]) == list(range(len(lengths)))
    padded = limits.padded_tokens(lengths)
    assert all(padded[list(pack)].sum() <= limits.capacity_tokens for pack in packs)
    assert all(padded[item] > limits.capacity_tokens for item in plan.oversize)
    assert {len(rank) for rank in plan.ranks} == {plan.packs_per_rank}
    assert plan.packs_per_rank % count_multiple == 0
    fitting = padded[padded <= limits.capacity_tokens]
    needed = max(1, len(best_fit_decreasing(fitting, limits.capacity_tokens)))
    assert len(packs) <= -(-needed // (ranks * count_multiple)) * ranks * count_multiple


LENGTHS = {
    "capped": lambda r, n: r.integers(60, 251, n) + np.where(r.random(n) < 0.99, 8192, r.integers(500, 8192, n)),
    "heavy": lambda r, n: (
        r.integers(60, 251, n) + np.minimum(r.lognormal(np.log(3000) - 0.5, 1, n).astype(int) + 1, 32_768)
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(LENGTHS))
def test_the_advised_budget_is_full_and_even(name, seed):
    lengths = LENGTHS[name](np.random.default_rng(seed), 1024)
    limits = PackLimits(8256 * 4, 8, 8)
    advice = advise_budget([lengths], limits, data_parallel=8, context_parallel=4)
    advised = PackLimits(advice.advised_tokens_per_gpu * 4, 8, 8)
    plan = plan_packs(lengths, advised, 8, quadratic)
    report = report_on([(plan, lengths)], advised, quadratic)
    assert report.packs == advice.advised_packs <= advice.packs
    assert report.fill_share >= 0.97
    assert report.rank_imbalance <= 1.03


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("ranks", "count", "capacity"), [(8, 512, 33_792), (4, 64, 16_384), (2, 40, 16_384)])
def test_packs_that_are_worked_on_at_a_time_cost_alike_where_there_is_room(ranks, count, capacity, seed):
    lengths = np.minimum(np.random.default_rng(seed).lognormal(7.6, 0.9, count).astype(int) + 50, 8192)
    report = report_on(
        [(plan_packs(lengths, PackLimits(capacity), ranks, quadratic), lengths)], PackLimits(capacity), quadratic
    )
    assert max(report.slot_imbalance, report.rank_imbalance) <= 1.02


@given(
    sizes=st.lists(st.integers(1, 50), min_size=4, max_size=60).map(np.array),
    ranks=st.integers(2, 4),
    room=st.integers(0, 9),
)
def test_trades_lose_no_sequence_keep_the_capacity_and_lower_the_largest_load(sizes, ranks, room):
    packs = best_fit_decreasing(sizes, 50)
    packs += [[] for _ in range(-len(packs) % ranks)]
    dealt = [packs[rank::ranks] for rank in range(ranks)]
    capacity = max(int(sizes[pack].sum()) for pack in packs) + room
    costs = sizes.astype(np.float64)
    traded = trade_sequences(dealt, sizes, costs, capacity)
    assert sorted(item for rank in traded for pack in rank for item in pack) == list(range(len(sizes)))
    assert [len(rank) for rank in traded] == [len(rank) for rank in dealt]
    assert all(sizes[pack].sum() <= capacity for rank in traded for pack in rank)
    before, after = (max(sum(costs[pack].sum() for pack in rank) for rank in one) for one in (dealt, traded))
    assert after <= before


def test_two_sequences_change_places_where_neither_fits_beside_the_other():
    sizes = np.array([6, 4, 5, 3])
    traded = trade_sequences([[[0, 1]], [[2, 3]]], sizes, sizes.astype(np.float64), 10)
    assert [[sorted(pack) for pack in rank] for rank in traded] == [[[1, 2]], [[0, 3]]]


def test_the_advisor_names_the_budget_that_saves_a_quarter_of_the_packs():
    """16 groups of 8 responses, nearly all cut at 8192 tokens: three fit into 4 x 8192, four into a little more."""
    lengths = LENGTHS["capped"](np.random.default_rng(0), 128)
    advice = advise_budget([lengths], PackLimits(4 * 8192, 8, 8), data_parallel=1, context_parallel=4)
    assert (advice.packs, advice.advised_packs) == (43, 32)
    assert 8192 < advice.advised_tokens_per_gpu <= 8448
    assert advice.worthwhile
    assert "8388 instead of 8192 (+2.4%) would need 32 packs instead of 43 (-26%)" in str(advice)
    content = advise_budget(
        [lengths], PackLimits(4 * advice.advised_tokens_per_gpu, 8, 8), data_parallel=1, context_parallel=4, reach=0.05
    )
    assert not content.worthwhile
    assert "fits these lengths" in str(content)


def test_imbalance_is_measured_over_ranks_and_over_slots():
    plan = plan_packs(np.array([8, 8, 4, 4]), PackLimits(8), 2, lambda n: n.astype(float))
    report = report_on([(plan, np.array([8, 8, 4, 4]))], PackLimits(8), lambda n: n.astype(float))
    assert plan.ranks == (((0,), (2,)), ((1,), (3,))) and report.rank_imbalance == report.slot_imbalance == 1
    uneven = report_on([(plan, np.array([8, 8, 8, 4]))], PackLimits(8), lambda n: n.astype(float))
    assert uneven.rank_imbalance == pytest.approx(16 / 14)


def test_a_report_by_hand_of_two_steps():
    """Budgets of 8 with padding to 4: the first step fills 8 + 8 of 4 packs with 5 + 3 and 8 tokens, where two ranks
    have a pack of nothing; the second one pack of each rank."""
    limits = PackLimits(8, 1, 4)
    first = replace(
        plan_packs(np.array([8, 8]), limits, 2, lambda n: n.astype(float)), ranks=(((0, 1), ()), ((2,), ()))
    )
    second = plan_packs(np.array([6, 2]), limits, 2, lambda n: n.astype(float))
    steps = [(first, np.array([5, 2, 8])), (second, np.array([6, 2]))]
    report = report_on(steps, limits, lambda n: n.astype(float), trained_tokens=9, oversize_ids=("a", "b", "c", "d"))
    assert (report.steps, report.packs, report.dummy_packs, report.sequences) == (2, 6, 2, 5)
    assert (report.real_tokens, report.padding_tokens, report.capacity_tokens) == (23, 1 + 8 + 2 + 2, 48)
    slowest, mean = 8 + 6, (15 + 8) / 2
    assert report.rank_imbalance == report.slot_imbalance == pytest.approx(slowest / mean)
    assert str(report) == (
        "5 sequences, 6 packs (2 dummy) in 2 steps, fill 47.9%, cost of the slowest rank 21.7% above the mean; "
        "4 sequences longer than a pack left out (a, b, c, ...)"
    )
    nothing = report_on([], limits, lambda n: n.astype(float))
    assert (nothing.rank_imbalance, nothing.slot_imbalance) == (1, 1)


def test_cost_per_length_calls_a_scalar_model_once_per_length():
    calls = []

    def cost(length):
        calls.append(length)
        return 2 * length

    assert cost_per_length(cost)(np.array([3, 5, 3])).tolist() == [6, 10, 6]
    assert calls == [3, 5]


def test_limits_that_cannot_hold_a_sequence_are_refused():
    with pytest.raises(ConfigError, match="below the padding multiple 8"):
        PackLimits(7, 8, 8)
    with pytest.raises(ConfigError, match="least common multiple"):
        PackLimits(64, 8, 12)
