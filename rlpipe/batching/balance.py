"""Even out the cost of data-parallel ranks by moving whole packs, then single sequences."""

import numpy as np
from numpy.typing import NDArray

from rlpipe.batching.bins import Bins

_NOTHING = -1
"""In place of a sequence: the trade is a move. As an index it means the 0 appended to sizes and costs."""

TOLERANCE = 0.002
"""Gap between the most and the least loaded rank, over the mean load, at which evening out stops."""


TRIED_RANKS = 8
"""How many of the least loaded ranks are tried as partners of the most loaded one."""


def spread_packs(packs: Bins, costs: NDArray[np.float64], ranks: int) -> list[Bins]:
    """Packs to ranks in equal counts: slot by slot in order of cost, then by swapping packs between ranks.

    packs: a multiple of `ranks` of them, each a list of sequence indices. costs: float64 [n] per sequence.
    """
    pack_costs = _pack_costs(packs, costs)
    dealt = _deal(pack_costs, ranks)
    _swap_packs(dealt, pack_costs)
    return [by_falling_cost([packs[number] for number in rank], costs) for rank in dealt]


def trade_sequences(
    ranks: list[Bins], sizes: NDArray[np.int64], costs: NDArray[np.float64], capacity: int
) -> list[Bins]:
    """Move a sequence, or swap two, between the most and the least loaded rank while that lowers the larger load.

    No pack comes to exceed `capacity`. sizes, costs: int64 [n], float64 [n] per sequence.
    """
    ranks = [[list(pack) for pack in rank] for rank in ranks]
    load = np.array([_pack_costs(rank, costs).sum() for rank in ranks])
    for _ in range(16 * len(ranks)):
        high = int(load.argmax())
        for low in np.argsort(load, kind="stable")[:TRIED_RANKS].tolist():
            gap = load[high] - load[low]
            if gap <= TOLERANCE * load.mean():
                return [by_falling_cost(rank, costs) for rank in ranks]
            gain = _trade(ranks[high], ranks[low], gap, sizes, costs, capacity)
            if gain:
                load[high] -= gain
                load[low] += gain
                break
        else:
            break
    return [by_falling_cost(rank, costs) for rank in ranks]


def by_falling_cost(packs: Bins, costs: NDArray[np.float64]) -> Bins:
    """The packs, costliest first."""
    return [packs[number] for number in np.argsort(-_pack_costs(packs, costs), kind="stable").tolist()]


def _pack_costs(packs: Bins, costs: NDArray[np.float64]) -> NDArray[np.float64]:
    prices = costs.tolist()
    return np.array([sum([prices[item] for item in pack]) for pack in packs])


def _deal(pack_costs: NDArray[np.float64], ranks: int) -> list[list[int]]:
    """Slot by slot in order of cost, the costliest pack of a slot to the least loaded rank."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks)
    for slot in np.argsort(-pack_costs, kind="stable").reshape(-1, ranks):
        for rank, number in zip(np.argsort(load, kind="stable").tolist(), slot.tolist(), strict=True):
            dealt[rank].append(number)
            load[rank] += pack_costs[number]
    return dealt


def _swap_packs(ranks: list[list[int]], pack_costs: NDArray[np.float64]) -> None:
    """Swap packs between the most and the least loaded rank while that lowers the larger load."""
    load = np.array([pack_costs[rank].sum() for rank in ranks])
    for _ in range(8 * len(ranks)):
        high, low = int(load.argmax()), int(load.argmin())
        gap = load[high] - load[low]
        if gap <= TOLERANCE * load.mean():
            return
        gains = pack_costs[ranks[high]][:, None] - pack_costs[ranks[low]][None, :]
        give, take = divmod(int(np.abs(gains - gap / 2).argmin()), len(ranks[low]))
        gain = gains[give, take]
        if not 0 < gain < gap:
            return
        ranks[high][give], ranks[low][take] = ranks[low][take], ranks[high][give]
        load[high] -= gain
        load[low] += gain


def _trade(
    high: Bins, low: Bins, gap: float, sizes: NDArray[np.int64], costs: NDArray[np.float64], capacity: int
) -> float:
    """Make the trade that comes nearest to closing the gap within capacity; returns the cost moved, 0 for no trade."""
    given = [(number, item) for number, pack in enumerate(high) for item in pack]
    taken = [(number, item) for number, pack in enumerate(low) for item in (*pack, _NOTHING)]
    give_pack, give = np.array(given).T
    take_pack, take = np.array(taken).T
    room_high = np.array([capacity - int(sizes[pack].sum()) for pack in high])[give_pack]
    room_low = np.array([capacity - int(sizes[pack].sum()) for pack in low])[take_pack]
    growth = np.append(sizes, 0)[give][:, None] - np.append(sizes, 0)[take][None, :]
    gains = np.append(costs, 0)[give][:, None] - np.append(costs, 0)[take][None, :]
    allowed = (growth <= room_low) & (-growth <= room_high[:, None]) & (gains > 0) & (gains < gap)
    if not allowed.any():
        return 0.0
    best = divmod(int(np.where(allowed, np.abs(gains - gap / 2), np.inf).argmin()), len(taken))
    (source, item), (target, other) = given[best[0]], taken[best[1]]
    high[source].remove(item)
    low[target].append(item)
    if other != _NOTHING:
        low[target].remove(other)
        high[source].append(other)
    return float(gains[best])
