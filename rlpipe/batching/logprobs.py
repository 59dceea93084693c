"""Carry per-token results from the packs they were computed in to samples and to other packs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rlpipe.batching.compact_pack import RankPacks
from rlpipe.shared.errors import DataError
from rlpipe.shared.pack import PackFrame
from rlpipe.shared.sample import Sample

LogprobsBySample = Mapping[str, NDArray[np.float32]]
"""Per sample id float32 [prompt + response], aligned by prediction."""


def logprobs_by_sample(
    packs: Sequence[Sequence[PackFrame]], results: Sequence[Sequence[NDArray[np.float32]]]
) -> dict[str, NDArray[np.float32]]:
    """Cut per-pack results into samples.

    packs, results: `[data_rank][pack]`; each result is float32 [T] in the layout of its pack. Dummy packs give nothing.
    Raises DataError where a result does not have its pack's length.
    """
    found: dict[str, NDArray[np.float32]] = {}
    for rank_packs, rank_results in zip(packs, results, strict=True):
        for pack, values in zip(rank_packs, rank_results, strict=True):
            if values.shape != (pack.padded_tokens,):
                raise DataError(f"a pack of {pack.padded_tokens} tokens got log-probabilities of shape {values.shape}")
            for sample_id, start, length in spans(pack):
                found[sample_id] = values[start : start + length]
    return found


def attach_logprobs(
    packs: Sequence[Sequence[Sequence[PackFrame]]],
    old: LogprobsBySample | None = None,
    reference: LogprobsBySample | None = None,
) -> list[list[list[PackFrame]]]:
    """The same packs (`[data_rank][step][pack]`) with old and reference log-probabilities where given.

    Raises DataError, naming it, for a sample whose log-probabilities are missing or have another length.
    """

    def attach(pack: PackFrame) -> PackFrame:
        if old is not None:
            pack = replace(pack, old_logprobs=_laid_out(pack, old))
        if reference is not None:
            pack = replace(pack, ref_logprobs=_laid_out(pack, reference))
        return pack

    return [[RankPacks(map(attach, step)) for step in rank] for rank in packs]


def response_logprobs(sample: Sample, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The entries of `values` (float32 [prompt + response], aligned by prediction) that predict response tokens."""
    return values[sample.prompt_tokens - 1 : sample.total_tokens - 1]


def spans(pack: PackFrame) -> list[tuple[str, int, int]]:
    """(sample id, first position, real length) of each sample of a pack."""
    return list(zip(pack.sample_ids, pack.cu_seqlens_padded, pack.lengths_tokens, strict=False))


def _laid_out(pack: PackFrame, by_sample: LogprobsBySample) -> NDArray[np.float32]:
    values = np.zeros(pack.padded_tokens, np.float32)
    for sample_id, start, length in spans(pack):
        found = by_sample.get(sample_id)
        if found is None or len(found) != length:
            have = "none" if found is None else f"{len(found)}"
            raise DataError(f"sample {sample_id} needs {length} log-probabilities but has {have}")
        values[start : start + length] = found
    return values
