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
    """Each number of its `n` samples once, 8 bytes a token instead of the 44 and more of a `Pack`: the driver copies
    them once, and the wire carries no more than that.

    prompt_tokens: of each sample. token_ids: int32 [R], prompts and responses without padding. rollout_logprobs:
    float32 [r], of the response tokens; loss_mask: int8 [r], None where all of them are trained. advantages: float64
    [n]; token_advantages: float64 [r], in their place where tokens are told apart. token_weights, temperatures: float64
    [n], what `build_pack` asks for.
    """

    prompt_tokens: tuple[int, ...]
    token_ids: NDArray[np.int32]
    rollout_logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.int8] | None
    advantages: NDArray[np.float64]
    token_advantages: NDArray[np.float64] | None
    token_weights: NDArray[np.float64]
    temperatures: NDArray[np.float64]
    limits: PackLimits

    def laid_out(self) -> Pack:
        laid = build_pack(self._sequences(), self.token_weights.tolist(), self.limits)
        return replace(laid, old_logprobs=self.old_logprobs, ref_logprobs=self.ref_logprobs, routes=self.routes)

    def _sequences(self) -> list[TrainingSequence]:
        responses = [a - b for a, b in zip(self.lengths_tokens, self.prompt_tokens, strict=True)]
        ends = list(accumulate(responses))
        by_token = self.token_advantages
        return [
            response_sequence(
                self.sample_ids[index],
                self.token_ids[self.cu_seqlens[index] : self.cu_seqlens[index + 1]],
                self.prompt_tokens[index],
                loss_mask=1 if self.loss_mask is None else self.loss_mask[end - tokens : end],
                advantages=self.advantages[index] if by_token is None else by_token[end - tokens : end],
                rollout_logprobs=self.rollout_logprobs[end - tokens : end],
                temperature=float(self.temperatures[index]),
            )
            for index, (end, tokens) in enumerate(zip(ends, responses, strict=True))
        ]


class SamplePacker:
    """Makes packs of `samples`, of which groups have their prompt in common.

    lengths_tokens, trained_tokens: of each sample.
    """

    def __init__(self, samples: Sequence[Sample], limits: PackLimits) -> None:
        """Raises DataError for a sample that no pack can hold, whatever its length."""
        self._samples = samples
        self._limits = limits
        self._responses = [sample.response_tokens for sample in samples]
        self._prompt_tokens = [sample.prompt_tokens for sample in samples]
        for sample, prompt, response in zip(samples, self._prompt_tokens, self._responses, strict=True):
            check_lengths(sample, prompt, response)
        self.lengths_tokens = list(map(add, self._prompt_tokens, self._responses))
        self.trained_tokens = [sample.trained_tokens for sample in samples]
        self._prompts: dict[int, NDArray[np.int32]] = {}

    def pack(self, indices: Sequence[int], weights: NDArray[np.float64]) -> CompactPack:
        """weights: float64 [n], of each trained token of these samples."""
        samples = [self._samples[index] for index in indices]
        lengths = [self.lengths_tokens[index] for index in indices]
        responses = [self._responses[index] for index in indices]
        all_trained = [self.trained_tokens[index] for index in indices] == responses
        return CompactPack(
            sample_ids=tuple([sample.sample_id for sample in samples]),
            cu_seqlens=(0, *accumulate(lengths)),
            cu_seqlens_padded=(0, *padded_ends(lengths, self._limits)),
            prompt_tokens=tuple([self._prompt_tokens[index] for index in indices]),
            token_ids=np.concatenate([part for sample in samples for part in self._token_ids(sample)]),
            rollout_logprobs=_joined([sample.rollout_logprobs for sample in samples], np.float32),
            loss_mask=None if all_trained else _joined([sample.loss_mask for sample in samples], np.int8),
            advantages=np.array([sample.advantage or 0.0 for sample in samples]),
            token_advantages=_token_advantages(samples, responses),
            token_weights=weights,
            temperatures=np.array([sample.temperature for sample in samples]),
            limits=self._limits,
        )

    def _token_ids(self, sample: Sample) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        prompt = sample.prompt.token_ids
        known = self._prompts.get(id(prompt))  # the samples keep it, so that no other takes its place
        if known is None:
            known = self._prompts[id(prompt)] = _array(prompt, np.int32)
        return known, _array(sample.response_ids, np.int32)


def _token_advantages(samples: Sequence[Sample], responses: Sequence[int]) -> NDArray[np.float64] | None:
    """Of each response token; None where no sample tells tokens apart."""
    if all(sample.token_advantages is None for sample in samples):
        return None
    by_token = [
        np.full(tokens, sample.advantage or 0.0) if sample.token_advantages is None else sample.token_advantages
        for sample, tokens in zip(samples, responses, strict=True)
    ]
    return np.concatenate([np.asarray(values, np.float64) for values in by_token])


def _joined(parts: Sequence[Any], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([_array(part, dtype) for part in parts])


def _array(values: Any, dtype: type[np.generic]) -> NDArray[Any]:
    return values.array if isinstance(values, NumberArray) else np.array(values, dtype)
