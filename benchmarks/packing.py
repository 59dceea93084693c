"""Packing quality and speed on two length distributions, next to what others do.

    python benchmarks/packing.py [--config configs/models/Qwen3.5-35B-A3B] [--samples 1024] [--ranks 8]

"capped": prompts of 60-250 tokens, responses up to 8192, 99 % of them truncated. "heavy": responses with a log-normal
length of mean 3000 cut at 32768. Budgets are those of 4 context-parallel GPUs. Costs are forward FLOPs.

fill: real tokens over capacity. rank: largest over mean cost of the ranks. slot: the same where ranks wait for each
other after every pack. over: packs above the budget. worst: the largest pack over the budget.
"""

import argparse
import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rlpipe.batching import CostModel, PackLimits, PackPlan, advise_budget, cost_per_length, plan_packs, report_on
from rlpipe.flops import sequence_cost
from rlpipe.model.model_reader import describe_model

CONTEXT_PARALLEL = 4
Lengths = NDArray[np.int64]
Packs = list[list[int]]


def capped(random: np.random.Generator, samples: int) -> Lengths:
    short = random.integers(500, 8192, samples)
    return random.integers(60, 251, samples) + np.where(random.random(samples) < 0.99, 8192, short)


def heavy(random: np.random.Generator, samples: int) -> Lengths:
    responses = random.lognormal(np.log(3000) - 0.5, 1.0, samples).astype(np.int64) + 1
    return random.integers(60, 251, samples) + np.minimum(responses, 32_768)


def first_fit_in_order(lengths: Lengths, limits: PackLimits, ranks: int, cost: CostModel) -> PackPlan:
    """First fit in order of arrival, packs split until they are a multiple of the ranks, then dealt round robin."""
    padded = limits.padded_tokens(lengths).tolist()
    packs: Packs = []
    rooms: list[int] = []
    for item, size in enumerate(padded):
        for number, room in enumerate(rooms):
            if room >= size:
                packs[number].append(item)
                rooms[number] -= size
                break
        else:
            packs.append([item])
            rooms.append(limits.capacity_tokens - size)
    while len(packs) % ranks:
        largest = max(range(len(packs)), key=lambda number: len(packs[number]))
        packs.append(packs[largest][1::2])
        packs[largest] = packs[largest][::2]
    return PackPlan(tuple(tuple(map(tuple, packs[rank::ranks])) for rank in range(ranks)), ())


def karmarkar_karp(costs: Sequence[float], parts: int) -> Packs:
    """Largest differencing method of Karmarkar and Karp (1982) for `parts` parts."""
    partitions = [([(cost, [item])] + [(0.0, [])] * (parts - 1), cost) for item, cost in enumerate(costs)]
    heap = [(-spread, number, partition) for number, (partition, spread) in enumerate(partitions)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, number, second = heapq.heappop(heap)
        merged = [(a + b, [*x, *y]) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    return [items for _, items in heap[0][2]]


def karmarkar_karp_without_cap(lengths: Lengths, limits: PackLimits, ranks: int, cost: CostModel) -> PackPlan:
    """As many packs as the tokens ask for, even in cost by Karmarkar-Karp, then packs to ranks by it again."""
    tokens = int(limits.padded_tokens(lengths).sum())
    slots = -(-tokens // (limits.capacity_tokens * ranks))
    costs = cost(lengths)
    packs = karmarkar_karp(costs.tolist(), slots * ranks)
    packs.sort(key=lambda pack: -float(costs[pack].sum()))
    dealt = [tuple(tuple(pack) for pack in packs[rank::ranks]) for rank in range(ranks)]
    return PackPlan(tuple(dealt), ())


def show(name: str, plan: PackPlan, seconds: float, lengths: Lengths, limits: PackLimits, cost: CostModel) -> None:
    report = report_on([(plan, lengths)], limits, cost)
    padded = limits.padded_tokens(lengths)
    sizes = [int(padded[list(pack)].sum()) for rank in plan.ranks for pack in rank]
    over = sum(size > limits.budget_tokens for size in sizes)
    print(
        f"  {name:34} {report.packs:6} {report.fill_share:8.1%} {report.rank_imbalance:8.4f} "
        f"{report.slot_imbalance:8.4f} {over:6} {max(sizes) / limits.budget_tokens:6.2f} {seconds:9.3f}"
    )


def timed(plan: Callable[[], PackPlan]) -> tuple[PackPlan, float]:
    start = time.perf_counter()
    return plan(), time.perf_counter() - start


def compare(name: str, lengths: Lengths, tokens_per_gpu: int, ranks: int, cost: CostModel) -> None:
    limits = PackLimits(tokens_per_gpu * CONTEXT_PARALLEL, 2 * CONTEXT_PARALLEL, 2 * CONTEXT_PARALLEL)
    advice = advise_budget([lengths], limits, data_parallel=ranks, context_parallel=CONTEXT_PARALLEL)
    advised = replace(limits, budget_tokens=advice.advised_tokens_per_gpu * CONTEXT_PARALLEL)
    print(f"{name}: {len(lengths)} sequences, mean {lengths.mean():.0f}, longest {lengths.max()}, {ranks} ranks")
    print(f"  {'':34} {'packs':>6} {'fill':>8} {'rank':>8} {'slot':>8} {'over':>6} {'worst':>6} {'seconds':>9}")
    planners = (
        ("first fit in order", first_fit_in_order),
        ("Karmarkar-Karp without cap", karmarkar_karp_without_cap),
        ("rlpipe", plan_packs),
    )
    for budget, chosen in ((tokens_per_gpu, limits), (advice.advised_tokens_per_gpu, advised)):
        for label, planner in planners:
            plan, seconds = timed(partial(planner, lengths, chosen, ranks, cost))
            show(f"{label}, {CONTEXT_PARALLEL} x {budget}", plan, seconds, lengths, chosen, cost)
    print(f"  advisor: {advice}\n")


def speed(cost: CostModel) -> None:
    print("100,000 sequences, 64 ranks, at 4 x 8448 tokens")
    for make in (capped, heavy):
        lengths = make(np.random.default_rng(0), 100_000)
        limits = PackLimits(8448 * CONTEXT_PARALLEL, 2 * CONTEXT_PARALLEL, 2 * CONTEXT_PARALLEL)
        processor = time.process_time()
        plan, seconds = timed(partial(plan_packs, lengths, limits, 64, cost))
        processor = time.process_time() - processor
        report = report_on([(plan, lengths)], limits, cost)
        print(
            f"  {make.__name__:8} {seconds:.2f} s ({processor:.2f} s of processor time), {report.packs} packs, fill "
            f"{report.fill_share:.1%}, rank {report.rank_imbalance:.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="Qwen3.5-35B-A3B", help="model whose FLOPs are the cost")
    parser.add_argument("--samples", type=int, default=1024, help="sequences of one optimizer step")
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    cost = cost_per_length(sequence_cost(describe_model(arguments.config).shape))
    random = np.random.default_rng(arguments.seed)
    compare("capped, a published setting", capped(random, 128), 8192, 1, cost)
    compare("capped", capped(random, arguments.samples), 8192, arguments.ranks, cost)
    compare("heavy", heavy(random, arguments.samples), 8256, arguments.ranks, cost)
    speed(cost)


if __name__ == "__main__":
    main()
