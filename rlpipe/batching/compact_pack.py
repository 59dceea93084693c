"""Packs of rollouts: on the driver a choice of samples, and laid out in the process that trains on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pickle import PickleBuffer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlpipe.batching.build_pack import build_pack, padded_ends
from rlpipe.batching.limits import PackLimits
from rlpipe.batching.sequences import TrainingSequence, check_lengths, response_sequence
from rlpipe.shared.pack import Pack, PackFrame
from rlpipe.shared.sample_table import Memory, SampleTable, memory


@dataclass(frozen=True, kw_only=True)
class CompactPack(PackFrame):
    """The arrays of its `n` samples as they are, each number once: 8 bytes a token instead of the 44 and more of a
    `Pack`.

    prompts, responses: int32 [tokens] of each sample; rollout_logprobs: float32 [response tokens] of each. loss_masks:
    int8 [response tokens] of each, None where all of them are trained. advantages: of each sample, one or float64
    [response tokens]. token_weights, temperatures: of each sample, what `build_pack` asks for.
    """

    prompts: list[Memory]
    responses: list[Memory]
    rollout_logprobs: list[Memory]
    loss_masks: list[Memory] | None
    advantages: list[float | NDArray[np.float64]]
    temperatures: list[float]
    token_weights: Sequence[float]
    limits: PackLimits

    def laid_out(self) -> Pack:
        sequences = [self._sequence(index) for index in range(len(self.sample_ids))]
        laid = build_pack(sequences, self.token_weights, self.limits)
        return replace(laid, old_logprobs=self.old_logprobs, ref_logprobs=self.ref_logprobs, routes=self.routes)

    def _sequence(self, index: int) -> TrainingSequence:
        prompt = np.frombuffer(self.prompts[index], np.int32)
        return response_sequence(
            self.sample_ids[index],
            np.concatenate((prompt, np.frombuffer(self.responses[index], np.int32))),
            len(prompt),
            loss_mask=1 if self.loss_masks is None else np.frombuffer(self.loss_masks[index], np.int8),
            advantages=self.advantages[index],
            rollout_logprobs=np.frombuffer(self.rollout_logprobs[index], np.float32),
            temperature=self.temperatures[index],
        )


@dataclass(frozen=True, kw_only=True)
class SampledPack(PackFrame):
    """Samples `indices` of those that `packer` has. Pickled it is a `CompactPack`, so that the arrays of millions of
    samples are looked for once: when they are sent."""

    packer: "SamplePacker"
    indices: Sequence[int]
    token_weights: Sequence[float]

    def laid_out(self) -> Pack:
        received, content = self.__reduce__()
        return received(*content).laid_out()

    def __reduce__(self) -> tuple[Callable[..., CompactPack], tuple[Any, ...]]:
        known = (self.sample_ids, self.cu_seqlens, self.cu_seqlens_padded)
        found = (self.old_logprobs, self.ref_logprobs, self.routes)
        return _received, (*known, *found, *self.packer.content(self.indices), self.token_weights, self.packer.limits)


def _received(*content: Any) -> CompactPack:
    """content: the fields of a CompactPack in order."""
    return CompactPack(**dict(zip(_FIELDS, content, strict=True)))


_FIELDS = tuple(field.name for field in fields(CompactPack))


class SamplePacker:
    """Makes packs of `samples`, of which groups have their prompt in common.

    ids, lengths_tokens: of each sample.
    """

    def __init__(self, samples: SampleTable, limits: PackLimits) -> None:
        """Raises DataError for a sample that no pack can hold, whatever its length."""
        for index in np.flatnonzero(samples.uneven).tolist():
            check_lengths(samples[index])
        self.limits = limits
        self._samples, self._content = samples.samples, samples.content
        self.ids = samples.content.ids
        self.lengths_tokens = (samples.prompt_tokens + samples.response_tokens).tolist()
        self._masked = set(np.flatnonzero(samples.trained_tokens < samples.response_tokens).tolist())
        # One that is not computed yet reads as 0.
        self._advantages = [one if isinstance(one, np.ndarray) else one or 0.0 for one in samples.advantages]

    def pack(self, indices: Sequence[int], token_weights: Sequence[float]) -> SampledPack:
        """token_weights: of each trained token of these samples."""
        ids, lengths = self.ids, [self.lengths_tokens[index] for index in indices]
        return SampledPack(
            sample_ids=tuple([ids[index] for index in indices]),
            cu_seqlens=(0, *accumulate(lengths)),
            cu_seqlens_padded=(0, *padded_ends(lengths, self.limits)),
            packer=self,
            indices=indices,
            token_weights=token_weights,
        )

    def content(self, indices: Sequence[int]) -> tuple[list[Any] | None, ...]:
        """What a `CompactPack` has of each of these samples, from `prompts` to `temperatures`."""
        known = self._content
        masks = None
        if not self._masked.isdisjoint(indices):
            masks = [PickleBuffer(memory(self._samples[index].loss_mask, np.int8)) for index in indices]
        return (
            [known.prompts[index] for index in indices],
            [PickleBuffer(known.responses[index]) for index in indices],
            [PickleBuffer(known.rollout_logprobs[index]) for index in indices],
            masks,
            [self._advantages[index] for index in indices],
            [known.temperatures[index] for index in indices],
        )
