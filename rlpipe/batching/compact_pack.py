"""Packs of rollouts: on the driver a choice of samples, and laid out in the process that trains on them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pickle import PickleBuffer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlpipe.batching.build_pack import build_pack, pack_ends, padded_pack_ends
from rlpipe.batching.limits import PackLimits
from rlpipe.batching.sequences import TrainingSequence, check_lengths, response_sequence
from rlpipe.shared.pack import Pack, PackFrame
from rlpipe.shared.sample_table import Memory, SampleTable, memory


@dataclass(frozen=True, kw_only=True)
class CompactPack(PackFrame):
    """The arrays of its `n` samples as they are, each number once: 8 bytes a token instead of the 44 and more of a
    `Pack`.

    prompts, responses: int32 [tokens] of each sample; rollout_logprobs: float32 [response tokens] of each. loss_masks:
    int8 [response tokens] of each, None for those of which all tokens are trained, and where that is so for all.
    advantages: of each sample, one or float64 [response tokens]. token_weights, temperatures: of each sample, what
    `build_pack` asks for.
    """

    token_weights: list[float]
    limits: PackLimits
    prompts: list[Memory]
    responses: list[Memory]
    rollout_logprobs: list[Memory]
    loss_masks: list[Memory | None] | None
    advantages: list[float | NDArray[np.float64]]
    temperatures: list[float]

    def laid_out(self) -> Pack:
        sequences = [self._sequence(index) for index in range(len(self.sample_ids))]
        laid = build_pack(sequences, self.token_weights, self.limits)
        return replace(laid, old_logprobs=self.old_logprobs, ref_logprobs=self.ref_logprobs, routes=self.routes)

    def _sequence(self, index: int) -> TrainingSequence:
        prompt = np.frombuffer(self.prompts[index], np.int32)
        mask = self.loss_masks[index] if self.loss_masks else None
        return response_sequence(
            self.sample_ids[index],
            np.concatenate((prompt, np.frombuffer(self.responses[index], np.int32))),
            len(prompt),
            loss_mask=1 if mask is None else np.frombuffer(mask, np.int8),
            advantages=self.advantages[index],
            rollout_logprobs=np.frombuffer(self.rollout_logprobs[index], np.float32),
            temperature=self.temperatures[index],
        )


@dataclass(frozen=True, kw_only=True)
class SampledPack(PackFrame):
    """Samples `indices` of those that `packer` has. Pickled it is a `CompactPack`, so that the arrays of millions of
    samples are looked for once: when they are sent."""

    packer: "SamplePacker"
    indices: list[int]
    token_weights: list[float]

    def laid_out(self) -> Pack:
        received, content = self.__reduce__()
        return received(*content).laid_out()

    def __reduce__(self) -> tuple[Callable[..., PackFrame], tuple[Any, ...]]:
        return _received_pack, _content([self])


class RankPacks(list[PackFrame]):
    """The packs of a data-parallel rank for one optimizer step. They are pickled together, because one by one they take
    longer than what they carry."""

    def __reduce__(self) -> tuple[Callable[..., list[PackFrame]], tuple[Any, ...]]:
        sampled = [pack for pack in self if isinstance(pack, SampledPack)]
        if not sampled:
            return list, (list(self),)
        others = [(place, pack) for place, pack in enumerate(self) if not isinstance(pack, SampledPack)]
        return _received_packs, (*_content(sampled), others)


def _content(packs: Sequence[SampledPack]) -> tuple[Any, ...]:
    """What `_received_packs` takes: of the packs, then of all their samples."""
    frames = [
        (
            pack.sample_ids,
            pack.cu_seqlens,
            pack.cu_seqlens_padded,
            pack.old_logprobs,
            pack.ref_logprobs,
            pack.routes,
            pack.token_weights,
        )
        for pack in packs
    ]
    packer = packs[0].packer
    return frames, packer.limits, packer.content(list(chain.from_iterable([pack.indices for pack in packs])))


def _received_packs(
    frames: Sequence[tuple[Any, ...]],
    limits: PackLimits,
    content: Sequence[list[Any] | None],
    others: Sequence[tuple[int, PackFrame]] = (),
) -> list[PackFrame]:
    """others: packs of no sample with their places, which rise."""
    packs: list[PackFrame] = []
    begin = 0
    for frame in frames:
        end = begin + len(frame[0])
        own = (column and column[begin:end] for column in content)
        packs.append(CompactPack(**dict(zip(_FIELDS, (*frame, limits, *own), strict=True))))
        begin = end
    for place, pack in others:
        packs.insert(place, pack)
    return packs


def _received_pack(*content: Any) -> PackFrame:
    return _received_packs(*content)[0]


_FIELDS = tuple(field.name for field in fields(CompactPack))


class SamplePacker:
    """Makes packs of `samples`, of which groups have their prompt in common.

    ids: of each sample. lengths_tokens: int64 [n].
    """

    def __init__(self, samples: SampleTable, limits: PackLimits) -> None:
        """Raises DataError for a sample that no pack can hold, whatever its length."""
        for index in np.flatnonzero(samples.uneven).tolist():
            check_lengths(samples[index])
        self.limits = limits
        self.ids = samples.content.ids
        self.lengths_tokens = samples.prompt_tokens + samples.response_tokens
        self._samples, known = samples.samples, samples.content
        entries = (known.prompts, known.responses, known.rollout_logprobs, known.temperatures)
        self._columns = tuple(column.__getitem__ for column in entries)
        self._masked = set(np.flatnonzero(samples.trained_tokens < samples.response_tokens).tolist())
        # One that is not computed yet reads as 0.
        self._advantages = [one if isinstance(one, np.ndarray) else one or 0.0 for one in samples.advantages]

    def packs(
        self, indices: NDArray[np.int64], token_weights: NDArray[np.float64], counts: NDArray[np.int64]
    ) -> Iterator[SampledPack]:
        """Of the first `counts[0]` of these samples, of the next `counts[1]`, and so on; at least one in each.

        token_weights: float64 [n], of each trained token of each sample.
        """
        lengths = self.lengths_tokens[indices]
        ends = pack_ends(lengths, counts).tolist()
        padded = padded_pack_ends(lengths, counts, self.limits).tolist()
        order, weights, begin = indices.tolist(), token_weights.tolist(), 0
        ids = list(map(self.ids.__getitem__, order))
        for number, end in enumerate(np.cumsum(counts).tolist()):
            told = slice(begin + number, end + number + 1)
            yield SampledPack(
                sample_ids=tuple(ids[begin:end]),
                cu_seqlens=tuple(ends[told]),
                cu_seqlens_padded=tuple(padded[told]),
                packer=self,
                indices=order[begin:end],
                token_weights=weights[begin:end],
            )
            begin = end

    def content(self, indices: Sequence[int]) -> tuple[list[Any] | None, ...]:
        """What a `CompactPack` has of each of these samples, from `prompts` to `temperatures`."""
        prompts, responses, logprobs, temperatures = self._columns
        masks = None
        if not self._masked.isdisjoint(indices):
            masks = [self._mask(index) if index in self._masked else None for index in indices]
        return (
            list(map(prompts, indices)),
            list(map(PickleBuffer, map(responses, indices))),
            list(map(PickleBuffer, map(logprobs, indices))),
            masks,
            list(map(self._advantages.__getitem__, indices)),
            list(map(temperatures, indices)),
        )

    def _mask(self, index: int) -> PickleBuffer:
        return PickleBuffer(memory(self._samples[index].loss_mask, np.int8))
