"""Would a slightly different token budget save packs?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlpipe.batching.bins import best_fit_decreasing
from rlpipe.batching.limits import PackLimits

WORTHWHILE_SHARE = 0.02
"""Share of packs that a change must save to be worth a line in the log."""

BALANCING_ROOM = 0.005
"""Added to the smallest budget where there are several ranks: packs without any room cannot be evened out."""


@dataclass(frozen=True)
class BudgetAdvice:
    """The smallest budget, at most `reach` above the present one, that needs the fewest packs of all in reach.

    Token budgets are per GPU; packs are those of all ranks and steps; fill is real tokens over capacity.
    """

    tokens_per_gpu: int
    packs: int
    fill_share: float
    advised_tokens_per_gpu: int
    advised_packs: int
    advised_fill_share: float

    @property
    def saved_share(self) -> float:
        """Share of the present packs that the advised budget saves."""
        return 1 - self.advised_packs / self.packs

    @property
    def worthwhile(self) -> bool:
        return self.saved_share >= WORTHWHILE_SHARE

    def __str__(self) -> str:
        change = self.advised_tokens_per_gpu / self.tokens_per_gpu - 1
        if not self.worthwhile:
            return (
                f"actor.max_tokens_per_gpu {self.tokens_per_gpu} fits these lengths: {self.packs} packs, fill "
                f"{self.fill_share:.1%}; {self.advised_tokens_per_gpu} would need {self.advised_packs}"
            )
        return (
            f"actor.max_tokens_per_gpu {self.advised_tokens_per_gpu} instead of {self.tokens_per_gpu} ({change:+.1%}) "
            f"would need {self.advised_packs} packs instead of {self.packs} ({-self.saved_share:.0%}), fill "
            f"{self.advised_fill_share:.1%} instead of {self.fill_share:.1%}"
        )


def advise_budget(
    steps: Sequence[NDArray[np.int64]],
    limits: PackLimits,
    *,
    data_parallel: int,
    context_parallel: int = 1,
    reach: float = 0.15,
) -> BudgetAdvice:
    """Search budgets from the longest sequence up to `1 + reach` times the present one.

    steps: real lengths (int64 [n]) of each optimizer step. Sequences longer than the present budget are not counted.
    About a dozen packings, so a fraction of a second for tens of thousands of sequences.
    """
    fitting = [lengths[limits.padded_tokens(lengths) <= limits.capacity_tokens] for lengths in steps]
    unit = limits.pack_multiple
    multiple = data_parallel * limits.count_multiple

    def packs(units: int) -> int:
        bins = (len(best_fit_decreasing(limits.padded_tokens(lengths), units * unit)) for lengths in fitting)
        return sum(max(1, -(-count // multiple)) * multiple for count in bins)

    longest = max(int(limits.padded_tokens(lengths).max(initial=1)) for lengths in fitting)
    largest = int(limits.budget_tokens * (1 + reach)) // unit
    low, high = -(-longest // unit), largest
    fewest = packs(largest)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if packs(middle) <= fewest else (middle + 1, high)
    if data_parallel > 1:
        high = min(math.ceil(high * (1 + BALANCING_ROOM)), largest)
    real = sum(int(lengths.sum()) for lengths in fitting)
    per_gpu = -(-high * unit // context_parallel)
    advised = replace(limits, budget_tokens=per_gpu * context_parallel)
    now, then = packs(limits.capacity_tokens // unit), packs(advised.capacity_tokens // unit)
    return BudgetAdvice(
        tokens_per_gpu=limits.budget_tokens // context_parallel,
        packs=now,
        fill_share=real / (now * limits.budget_tokens),
        advised_tokens_per_gpu=per_gpu,
        advised_packs=then,
        advised_fill_share=real / (then * advised.budget_tokens),
    )
