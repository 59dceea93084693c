"""What packing cost: fill, padding, imbalance, and what was left out."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rlpipe.batching.limits import PackLimits
from rlpipe.batching.pack_plan import CostModel, PackPlan


@dataclass(frozen=True)
class PackReport:
    """Totals over all ranks and optimizer steps of one iteration.

    capacity_tokens: budget of all packs, dummy ones included. padding_tokens: between and after sequences, and in dummy
    packs. rank_imbalance: largest over mean cost of the ranks (1 is even), summed over steps. slot_imbalance: the same
    where ranks wait for each other after every pack. oversize_ids: sequences longer than a pack, left out of the step.
    """

    steps: int
    packs: int
    dummy_packs: int
    sequences: int
    real_tokens: int
    trained_tokens: int
    padding_tokens: int
    capacity_tokens: int
    rank_imbalance: float
    slot_imbalance: float
    oversize_ids: tuple[str, ...]

    @property
    def fill_share(self) -> float:
        """Real tokens over the capacity of all packs."""
        return self.real_tokens / self.capacity_tokens

    @property
    def metrics(self) -> dict[str, float]:
        """Values by their names in the metric dictionary."""
        return {
            "pack/packs_count": self.packs,
            "pack/dummy_packs_count": self.dummy_packs,
            "pack/fill_share": self.fill_share,
            "pack/padding_tokens": self.padding_tokens,
            "pack/rank_imbalance": self.rank_imbalance,
            "pack/slot_imbalance": self.slot_imbalance,
            "pack/oversize_count": len(self.oversize_ids),
        }

    def __str__(self) -> str:
        text = (
            f"{self.sequences} sequences, {self.packs} packs ({self.dummy_packs} dummy) in {self.steps} steps, "
            f"fill {self.fill_share:.1%}, cost of the slowest rank {self.rank_imbalance - 1:.1%} above the mean"
        )
        if self.oversize_ids:
            shown = ", ".join(self.oversize_ids[:3])
            text += f"; {len(self.oversize_ids)} sequences longer than a pack left out ({shown}, ...)"
        return text


def report_on(
    steps: Sequence[tuple[PackPlan, NDArray[np.int64]]],
    limits: PackLimits,
    cost: CostModel,
    trained_tokens: int = 0,
    oversize_ids: Sequence[str] = (),
) -> PackReport:
    """Measure plans. `steps`: each optimizer step's plan with the real lengths (int64 [n]) that its indices mean."""
    real = padded = sequences = dummies = 0
    slowest_rank = slowest_slots = mean_rank = 0.0
    for plan, lengths in steps:
        costs = cost(lengths)
        padded_lengths = limits.padded_tokens(lengths)
        packs = [pack for rank in plan.ranks for pack in rank]
        members = np.fromiter(chain.from_iterable(packs), np.int64)
        numbers = np.repeat(np.arange(len(packs)), list(map(len, packs)))
        pack_costs = np.bincount(numbers, costs[members], len(packs)).reshape(len(plan.ranks), -1)
        sizes = _pack_tokens(np.bincount(numbers, padded_lengths[members], len(packs)).astype(np.int64), limits)
        real += int(lengths[members].sum())
        padded += int(sizes.sum())
        sequences += len(members)
        dummies += sum(not pack for pack in packs)
        slowest_rank += float(pack_costs.sum(axis=1).max())
        slowest_slots += float(pack_costs.max(axis=0).sum())
        mean_rank += float(pack_costs.sum()) / len(plan.ranks)
    packs_count = sum(len(plan.ranks) * plan.packs_per_rank for plan, _ in steps)
    return PackReport(
        steps=len(steps),
        packs=packs_count,
        dummy_packs=dummies,
        sequences=sequences,
        real_tokens=real,
        trained_tokens=trained_tokens,
        padding_tokens=padded - real,
        capacity_tokens=packs_count * limits.budget_tokens,
        rank_imbalance=slowest_rank / mean_rank if mean_rank else 1.0,
        slot_imbalance=slowest_slots / mean_rank if mean_rank else 1.0,
        oversize_ids=tuple(oversize_ids),
    )


def _pack_tokens(sequence_tokens: NDArray[np.int64], limits: PackLimits) -> NDArray[np.int64]:
    """Tokens of packs after padding, int64 [packs]; a dummy pack has `pack_multiple`."""
    return np.maximum(1, -(-sequence_tokens // limits.pack_multiple)) * limits.pack_multiple
