"""How much of several token sequences is the same beginning: what a pass over their tree would compute once."""

from collections.abc import Sequence
from itertools import pairwise

Tokens = tuple[int, ...]

_FIRST_LOOK = 64


def repeated_prefix_tokens(sequences: Sequence[Tokens]) -> int:
    """Tokens of `sequences` beyond the nodes of their prefix tree. In lexical order, each shares most with the one
    before it, and that much is in the tree already."""
    return sum(_common_prefix(before, after) for before, after in pairwise(sorted(sequences)))


def _common_prefix(one: Tokens, other: Tokens) -> int:
    """Compares slices, not tokens: prompts are long, and there are many."""
    most = min(len(one), len(other))
    low, step = 0, _FIRST_LOOK
    while low < most:
        end = min(low + step, most)
        if one[low:end] == other[low:end]:
            low, step = end, 2 * step
        elif end - low == 1:
            return low
        else:
            step = (end - low + 1) // 2
    return low
