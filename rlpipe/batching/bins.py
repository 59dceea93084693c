"""Bin packing under a hard capacity. Deterministic: equal inputs give equal bins."""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Bins = list[list[int]]


class _OpenBins:
    """Bins by the room they have left, with the tightest one that still has `room` found in a few word operations.

    Room is an integer below `limit`. A two-level bitmap of about sqrt(limit) bits per word says which rooms occur.
    """

    def __init__(self, limit: int) -> None:
        self._shift = (limit.bit_length() + 1) // 2
        self._low_bits = (1 << self._shift) - 1
        self._words = [0] * ((limit >> self._shift) + 1)
        self._occupied_words = 0
        self._stacks: dict[int, list[int]] = {}

    def push(self, room: int, number: int) -> None:
        stack = self._stacks.get(room)
        if stack:
            stack.append(number)
        else:
            self._stacks[room] = [number]
            self._words[room >> self._shift] |= 1 << (room & self._low_bits)
            self._occupied_words |= 1 << (room >> self._shift)

    def pop_tightest(self, room: int) -> tuple[int, int] | None:
        """Remove and return `(room left, bin)` of the bin with the least room of at least `room`."""
        high = room >> self._shift
        bits = self._words[high] >> (room & self._low_bits)
        if bits:
            found = room + _lowest_bit(bits)
        else:
            above = self._occupied_words >> (high + 1)
            if not above:
                return None
            high += 1 + _lowest_bit(above)
            found = (high << self._shift) + _lowest_bit(self._words[high])
        stack = self._stacks[found]
        number = stack.pop()
        if not stack:
            self._words[high] &= ~(1 << (found & self._low_bits))
            if not self._words[high]:
                self._occupied_words &= ~(1 << high)
        return found, number


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def best_fit_decreasing(sizes: NDArray[np.int64], capacity: int) -> Bins:
    """Place items, largest first, each into the fullest bin that has room; open a bin where none has.

    sizes: int64 [n], each in 1..capacity. Returns lists of indices. At most 11/9 of the optimal count + 6/9 (Dosa
    2007, for first-fit decreasing; best fit is no worse), in practice within a fraction of a percent for many items.
    Items of equal size are placed together: the fullest bin with room stays the fullest until it is full.
    """
    bins: Bins = []
    open_bins = _OpenBins(capacity)
    order = np.argsort(-sizes, kind="stable")
    items = order.tolist()
    borders = [*np.flatnonzero(np.diff(sizes[order], prepend=0)).tolist(), len(items)]
    for start, end in zip(borders, borders[1:], strict=False):
        size = int(sizes[items[start]])
        while start < end:
            place = open_bins.pop_tightest(size)
            if place is None:
                place = (capacity, len(bins))
                bins.append([])
            room, number = place
            taken = items[start : min(end, start + room // size)]
            bins[number] += taken
            start += len(taken)
            room -= size * len(taken)
            if room:
                open_bins.push(room, number)
    return bins


def level_fit(sizes: NDArray[np.int64], costs: NDArray[np.float64], capacity: int, count: int) -> Bins | None:
    """Place items into exactly `count` bins so that bin costs are even; None where the heuristic finds no way.

    Most costly item first, each into the cheapest bin (longest processing time first, Graham 1969). A bin without room
    for the item at hand steps aside; items that no remaining bin takes go to the tightest one of those.
    """
    values, prices = sizes.tolist(), costs.tolist()
    bins: Bins = [[] for _ in range(count)]
    room = [capacity] * count
    heap = [(0.0, number) for number in range(count)]
    aside = _OpenBins(capacity)
    for item in np.lexsort((-sizes, -costs)).tolist():
        size = values[item]
        while heap:
            cost, number = heap[0]
            if room[number] >= size:
                heapq.heapreplace(heap, (cost + prices[item], number))
                room[number] -= size
                break
            heapq.heappop(heap)
            aside.push(room[number], number)
        else:
            place = aside.pop_tightest(size)
            if place is None:
                return None
            number = place[1]
            room[number] -= size
            aside.push(room[number], number)
        bins[number].append(item)
    return bins


def deal(sizes: NDArray[np.int64], costs: NDArray[np.float64], count: int) -> list[NDArray[np.int64]]:
    """The bins of `level_fit` where there is room for everything, as int64 arrays in the order of placement.

    A heap takes an operation for each item. Here all bins up to the first that would be passed by one that has just got
    an item take theirs at once: as long as costs fall slowly, nearly all of them.
    """
    order = np.lexsort((-sizes, -costs))
    prices, owners = costs[order], np.empty(len(order), np.int64)
    loads, numbers = np.zeros(count), np.arange(count)
    begin = 0
    while begin < len(order):
        grown = loads[: len(order) - begin] + prices[begin : begin + count]
        passed = np.minimum.accumulate(grown)[:-1] <= loads[1 : len(grown)]
        taken = int(passed.argmax()) + 1 if passed.any() else len(grown)
        owners[begin : begin + taken] = numbers[:taken]
        loads[:taken] = grown[:taken]
        cheapest_first = np.lexsort((numbers, loads))
        loads, numbers, begin = loads[cheapest_first], numbers[cheapest_first], begin + taken
    ends = np.cumsum(np.bincount(owners, minlength=count))
    return np.split(order[np.argsort(owners, kind="stable")], ends[:-1])


def split_to_count(bins: Bins, costs: NDArray[np.float64], count: int) -> Bins:
    """Split the most costly bins of several items in two even parts until there are `count` bins.

    Returns fewer than `count` where there are fewer items.
    """
    prices = costs.tolist()
    heap = [(-sum(prices[item] for item in items), number) for number, items in enumerate(bins) if len(items) > 1]
    heapq.heapify(heap)
    result = [list(items) for items in bins]
    while heap and len(result) < count:
        _, number = heapq.heappop(heap)
        parts = _halves(result[number], prices)
        for target, (items, cost) in zip((number, len(result)), parts, strict=True):
            if target == len(result):
                result.append(items)
            result[target] = items
            if len(items) > 1:
                heapq.heappush(heap, (-cost, target))
    return result


def _halves(items: Sequence[int], prices: list[float]) -> tuple[tuple[list[int], float], tuple[list[int], float]]:
    sides: tuple[list[int], list[int]] = ([], [])
    totals = [0.0, 0.0]
    for item in sorted(items, key=lambda i: (-prices[i], i)):
        side = int(totals[1] < totals[0]) if sides[0] else 0
        side = 1 if sides[0] and not sides[1] else side
        sides[side].append(item)
        totals[side] += prices[item]
    return (sides[0], totals[0]), (sides[1], totals[1])
