"""One sequence ready to be laid into a pack: arrays aligned by prediction (see `rlpipe.shared.pack`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlpipe.shared.errors import DataError
from rlpipe.shared.sample import Sample

ResponseValues = Sequence[float] | NDArray[np.number] | float


@dataclass(frozen=True)
class TrainingSequence:
    """`n` tokens. Entry `t` of `loss_mask`, `advantages` and `rollout_logprobs` belongs to predicting token `t + 1`.

    token_ids: int64 [n]. loss_mask, advantages, rollout_logprobs: float32 [n]; the last entry is 0. `temperature`:
    what the response was sampled at.
    """

    sequence_id: str
    group_id: str
    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    advantages: NDArray[np.float32]
    rollout_logprobs: NDArray[np.float32]
    temperature: float = 1.0
    episode_id: str = ""

    @property
    def episode(self) -> str:
        """Names the episode; a sequence without one is an episode of its own."""
        return self.episode_id or self.sequence_id

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


def response_sequence(
    sequence_id: str,
    token_ids: NDArray[np.integer],
    prompt: int,
    *,
    loss_mask: ResponseValues,
    advantages: ResponseValues,
    rollout_logprobs: ResponseValues,
    temperature: float,
) -> TrainingSequence:
    """The sequence of a rollout: `prompt` tokens of its prompt, at least one, then the response.

    token_ids: [prompt + response]. loss_mask, advantages, rollout_logprobs: of each response token, or one for all.
    """
    response = len(token_ids) - prompt
    return TrainingSequence(
        sequence_id=sequence_id,
        group_id="",
        token_ids=token_ids.astype(np.int64),
        loss_mask=_predicting(loss_mask, prompt, response),
        advantages=_predicting(advantages, prompt, response),
        rollout_logprobs=_predicting(rollout_logprobs, prompt, response),
        temperature=temperature,
    )


def check_lengths(sample: Sample) -> None:
    """Raises DataError for an empty prompt (nothing predicts the first response token) and for arrays of unequal
    length."""
    if sample.prompt_tokens == 0:
        raise DataError(f"sample {sample.sample_id} has an empty prompt: give it at least one token")
    response = sample.response_tokens
    if not response == len(sample.loss_mask) == len(sample.rollout_logprobs):
        raise DataError(
            f"sample {sample.sample_id} has {response} response tokens, {len(sample.loss_mask)} loss mask entries and "
            f"{len(sample.rollout_logprobs)} log-probabilities: all three must be equal"
        )


def supervised_sequence(
    sequence_id: str, prompt_ids: Sequence[int], answer_ids: Sequence[int], answer_mask: Sequence[int] | None = None
) -> TrainingSequence:
    """A sequence for supervised training: the prompt is context, the answer tokens (those of the mask) are targets."""
    if not prompt_ids:
        raise DataError(f"sequence {sequence_id} has an empty prompt: give it at least one token")
    mask = _predicting(1 if answer_mask is None else answer_mask, len(prompt_ids), len(answer_ids))
    zeros = np.zeros_like(mask)
    tokens = np.array([*prompt_ids, *answer_ids], dtype=np.int64)
    return TrainingSequence(sequence_id, sequence_id, tokens, mask, zeros, zeros)


def _predicting(response_values: ResponseValues, prompt: int, response: int) -> NDArray[np.float32]:
    """Values of response tokens (or one for all) at the positions that predict them: float32 [prompt + response]."""
    values = np.zeros(prompt + response, dtype=np.float32)
    values[prompt - 1 : -1] = response_values
    return values
