"""How much of several token sequences is the same beginning: what a pass over their tree would compute once."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rlpipe.shared.number_arrays import TokenIds, Tokens

_FIRST_LOOK = 64
_BIG_ENDIAN = np.dtype(">i4")  # bytes of token ids are in the order of the ids


def repeated_prefix_tokens(sequences: Sequence[Tokens]) -> int:
    """Tokens of `sequences` beyond the nodes of their prefix tree.

    Goes down the tree in pieces that grow, and only where sequences are still the same: what they do not share is not
    looked at.
    """
    repeated = 0
    branches = [([TokenIds.of(sequence).array for sequence in sequences], 0, _FIRST_LOOK)]
    while branches:
        members, begin, size = branches.pop()
        pieces: dict[bytes, list[NDArray[np.int32]]] = {}
        for member in members:
            pieces.setdefault(member[begin : begin + size].astype(_BIG_ENDIAN).tobytes(), []).append(member)
        repeated += sum(len(piece) // 4 * (len(same) - 1) for piece, same in pieces.items())
        # In lexical order, each shares most with the one before it, and that much is in the tree already.
        repeated += sum(_common_prefix(before, after) for before, after in pairwise(sorted(pieces)))
        branches += [
            (same, begin + size, 2 * size) for piece, same in pieces.items() if len(same) > 1 and len(piece) == 4 * size
        ]
    return repeated


def _common_prefix(one: bytes, other: bytes) -> int:
    """Of two pieces that differ: how many tokens they begin with alike."""
    first, second = np.frombuffer(one, np.int32), np.frombuffer(other, np.int32)
    most = min(first.size, second.size)
    different = first[:most] != second[:most]
    return int(different.argmax()) if different.any() else most
