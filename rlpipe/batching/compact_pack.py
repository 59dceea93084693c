"""A pack of rollouts that is laid out in the process that trains on it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlpipe.batching.build_pack import build_pack, padded_ends
from rlpipe.batching.limits import PackLimits
from rlpipe.batching.sequences import TrainingSequence, check_lengths, response_sequence
from rlpipe.shared.number_arrays import NumberArray
from rlpipe.shared.pack import Pack, PackFrame
from rlpipe.shared.sample import Sample


@dataclass(frozen=True, kw_only=True)
class CompactPack(PackFrame):
    """The arrays of its `n` samples as they are, each number once: 8 bytes a token instead of the 44 and more of a
    `Pack`. The driver copies none of them; Ray does, once, into its store.

    prompts, responses: int32 [tokens] of each sample; rollout_logprobs: float32 [response tokens] of each. loss_masks:
    int8 [response tokens] of each, None where all of them are trained. advantages: of each sample, one or float64
    [response tokens]. token_weights, temperatures: of each sample, what `build_pack` asks for.
    """

    prompts: tuple[NDArray[np.int32], ...]
    responses: tuple[NDArray[np.int32], ...]
    rollout_logprobs: tuple[NDArray[np.float32], ...]
    loss_masks: tuple[NDArray[np.int8], ...] | None
    advantages: tuple[float | NDArray[np.float64], ...]
    token_weights: tuple[float, ...]
    temperatures: tuple[float, ...]
    limits: PackLimits

    def laid_out(self) -> Pack:
        sequences = [self._sequence(index) for index in range(len(self.sample_ids))]
        laid = build_pack(sequences, self.token_weights, self.limits)
        return replace(laid, old_logprobs=self.old_logprobs, ref_logprobs=self.ref_logprobs, routes=self.routes)

    def _sequence(self, index: int) -> TrainingSequence:
        prompt = self.prompts[index]
        return response_sequence(
            self.sample_ids[index],
            np.concatenate((prompt, self.responses[index])),
            len(prompt),
            loss_mask=1 if self.loss_masks is None else self.loss_masks[index],
            advantages=self.advantages[index],
            rollout_logprobs=self.rollout_logprobs[index],
            temperature=self.temperatures[index],
        )


class SamplePacker:
    """Makes packs of `samples`, of which groups have their prompt in common.

    lengths_tokens, trained_tokens: of each sample.
    """

    def __init__(self, samples: Sequence[Sample], limits: PackLimits) -> None:
        """Raises DataError for a sample that no pack can hold, whatever its length."""
        self._samples = samples
        self._limits = limits
        self._responses = [sample.response_tokens for sample in samples]
        prompts = [sample.prompt_tokens for sample in samples]
        for sample, prompt, response in zip(samples, prompts, self._responses, strict=True):
            check_lengths(sample, prompt, response)
        self.lengths_tokens = list(map(add, prompts, self._responses))
        self.trained_tokens = [sample.trained_tokens for sample in samples]
        self._prompts: dict[int, NDArray[np.int32]] = {}

    def pack(self, indices: Sequence[int], weights: NDArray[np.float64]) -> CompactPack:
        """weights: float64 [n], of each trained token of these samples."""
        samples = [self._samples[index] for index in indices]
        lengths = [self.lengths_tokens[index] for index in indices]
        all_trained = all([self.trained_tokens[index] == self._responses[index] for index in indices])
        return CompactPack(
            sample_ids=tuple([sample.sample_id for sample in samples]),
            cu_seqlens=(0, *accumulate(lengths)),
            cu_seqlens_padded=(0, *padded_ends(lengths, self._limits)),
            prompts=tuple([self._prompt(sample) for sample in samples]),
            responses=tuple([_array(sample.response_ids, np.int32) for sample in samples]),
            rollout_logprobs=tuple([_array(sample.rollout_logprobs, np.float32) for sample in samples]),
            loss_masks=None if all_trained else tuple([_array(sample.loss_mask, np.int8) for sample in samples]),
            advantages=tuple(map(_advantage, samples)),
            token_weights=tuple(weights.tolist()),
            temperatures=tuple([sample.temperature for sample in samples]),
            limits=self._limits,
        )

    def _prompt(self, sample: Sample) -> NDArray[np.int32]:
        token_ids = sample.prompt.token_ids
        known = self._prompts.get(id(token_ids))  # the samples keep it, so that no other takes its place
        if known is None:
            known = self._prompts[id(token_ids)] = _array(token_ids, np.int32)
        return known


def _advantage(sample: Sample) -> float | NDArray[np.float64]:
    """Of each token where they are told apart. One that is not computed yet reads as 0."""
    if sample.token_advantages is None:
        return sample.advantage or 0.0
    return np.array(sample.token_advantages, np.float64)


def _array(values: Any, dtype: type[np.generic]) -> NDArray[Any]:
    return values.array if isinstance(values, NumberArray) else np.array(values, dtype)
