"""Sequence lengths of a batch when only `cu_seqlens` or a dense shape is to hand.

rlpipe's own packs know their lengths (`Pack.lengths_tokens`) and need none of this. It exists for batches that come
from elsewhere, and settles what such batches leave open (the cases of Megatron-Bridge's pull request 3839).
"""

from collections.abc import Sequence

Ends = Sequence[int]


def batch_lengths(
    rows: int,
    row_tokens: int,
    *,
    cu_seqlens: Sequence[Ends] = (),
    cu_seqlens_unpadded: Sequence[Ends] = (),
    real_tokens: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Lengths in tokens of the sequences in one micro-batch of shape [rows, row_tokens].

    cu_seqlens: for each row (a pack is one row) the ends of its sequences, from 0 on; rows are never compared with
        each other. Entries from the first negative one on are filling; repeated ends are empty sequences.
    cu_seqlens_unpadded: the same without alignment padding; preferred where given.
    real_tokens: for each row the tokens that are no padding, where known: a padded tail that the row presents as a
        last sequence is cut there.
    A row without a usable list is one sequence of `row_tokens`. Concatenate the results of several micro-batches.
    ValueError if ends decrease or do not start at 0, or if lists are given for another number of rows.
    """
    if not row_tokens:
        return ()
    chosen = next((ends for ends in (cu_seqlens_unpadded, cu_seqlens) if any(map(len, ends))), [()] * rows)
    limits = [row_tokens] * rows if real_tokens is None else real_tokens
    if not rows == len(chosen) == len(limits):
        raise ValueError(f"{rows} rows, but cu_seqlens for {len(chosen)} and real_tokens for {len(limits)} of them")
    lengths_of_rows = [_row_lengths(ends, limit) for ends, limit in zip(chosen, limits, strict=True)]
    return tuple(length for lengths in lengths_of_rows for length in lengths or [row_tokens])


def _row_lengths(ends: Ends, real_tokens: int) -> list[int]:
    filling = next((position for position, end in enumerate(ends) if end < 0), len(ends))
    kept = list(ends[:filling])
    if kept and kept[0] != 0:
        raise ValueError(f"cu_seqlens starts at {kept[0]}, expected 0")
    if any(end < start for start, end in zip(kept, kept[1:], strict=False)):
        raise ValueError(f"cu_seqlens {kept} decreases")
    clipped = [min(end, real_tokens) for end in kept]
    return [end - start for start, end in zip(clipped, clipped[1:], strict=False) if end > start]
