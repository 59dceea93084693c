"""Samples with columns: what is asked of all samples of an iteration, one array for each question."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from rlpipe.shared.sample import Sample, Status

Advantage = float | NDArray[np.float64]
"""Of all tokens of a response, or of each: float64 [response tokens]."""
Memory = Any
"""That of numbers, contiguous: an array, bytes, or a PickleBuffer, which Ray copies into its store once."""


class Content(NamedTuple):
    """What packs take of `n` samples, a list of n entries each, so that no sample has to be looked at to send it.

    prompts: int32, the same object where samples have a prompt in common. responses: memory of int32. rollout_logprobs:
    memory of float32.
    """

    ids: list[str]
    prompts: list[bytes]
    responses: list[Memory]
    rollout_logprobs: list[Memory]
    temperatures: list[float]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Content":
        made = {id(sample.prompt.token_ids): sample.prompt.token_ids for sample in samples}
        prompts = {place: np.array(token_ids, np.int32).tobytes() for place, token_ids in made.items()}
        return cls(
            [sample.sample_id for sample in samples],
            [prompts[id(sample.prompt.token_ids)] for sample in samples],
            [memory(sample.response_ids, np.int32) for sample in samples],
            [memory(sample.rollout_logprobs, np.float32) for sample in samples],
            [sample.temperature for sample in samples],
        )

    @classmethod
    def joined(cls, parts: Sequence["Content"]) -> "Content":
        return cls(*(list(chain.from_iterable(lists)) for lists in zip(*(part.lists for part in parts), strict=True)))

    def changed(self, samples: Mapping[int, Sample]) -> "Content":
        """With these in the places of others."""
        content = Content(*map(list, self.lists))
        for new, entries in zip(content.lists, Content.of(list(samples.values())).lists, strict=True):
            for index, entry in zip(samples, entries, strict=True):
                new[index] = entry
        return content

    @property
    def lists(self) -> tuple[list[Any], ...]:
        return self.ids, self.prompts, self.responses, self.rollout_logprobs, self.temperatures


class SampleTable(Sequence[Sample]):
    """`n` samples in order, looked at once: those of a group when it is finished, while engines still write others.
    What GPUs wait for afterwards works on columns.

    samples: as they were given. Those that the table itself hands out have their entry of `advantages`, where there are
    any. content: what packs take of them. scores: float64 [n], NaN without a reward. groups: int64 [n], numbers in the
    order of their first appearance.
    prompt_tokens, response_tokens, trained_tokens: int64 [n]. failed: bool [n], by status. uneven: bool [n], without a
    prompt or with another number of mask entries or log-probabilities than of response tokens. of_episodes: bool [n],
    those whose episode has a name, so that it may have other branches.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        columns: NDArray[np.int64],
        scores: NDArray[np.float64],
        content: Content,
        advantages: Sequence[Advantage] | None = None,
    ) -> None:
        """columns: int64 [n, 7], what the properties say, in their order."""
        self.samples, self.scores, self.content = samples, scores, content
        self._columns, self._advantages = columns, advantages

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "SampleTable":
        """`samples` itself where it is one already."""
        if isinstance(samples, SampleTable):
            return samples
        columns = np.empty((len(samples), 7), np.int64)
        columns[:, 0] = numbered(sample.group_id for sample in samples)
        columns[:, 1:] = np.array([_row(sample) for sample in samples]).reshape(-1, 6)
        scores = np.array([_score(sample) for sample in samples], np.float64)
        return cls(samples, columns, scores, Content.of(samples))

    @classmethod
    def joined(cls, tables: Sequence["SampleTable"]) -> "SampleTable":
        """The samples of one after those of the other; no group may be in two of them."""
        columns = np.concatenate([table._columns for table in tables])
        groups = np.array([table.groups.max(initial=-1) + 1 for table in tables])
        columns[:, 0] += np.repeat(np.cumsum(groups) - groups, list(map(len, tables)))
        samples = list(chain.from_iterable([table.samples for table in tables]))
        content = Content.joined([table.content for table in tables])
        return cls(samples, columns, np.concatenate([table.scores for table in tables]), content)

    def with_samples(self, samples: Sequence[Sample]) -> "SampleTable":
        """These, one for each of its own and of the same group, without advantages; most are its own."""
        others = {
            index: sample
            for index, (sample, own) in enumerate(zip(samples, self.samples, strict=True))
            if sample is not own
        }
        columns, scores = self._columns.copy(), self.scores.copy()
        for index, sample in others.items():
            columns[index, 1:], scores[index] = _row(sample), _score(sample)
        return SampleTable(samples, columns, scores, self.content.changed(others))

    def with_advantages(self, advantages: Sequence[Advantage]) -> "SampleTable":
        """advantages: of each sample."""
        return SampleTable(self.samples, self._columns, self.scores, self.content, advantages)

    @property
    def advantages(self) -> Sequence[Advantage | None]:
        """None for samples that have none yet."""
        return [_own_advantage(sample) for sample in self.samples] if self._advantages is None else self._advantages

    @property
    def groups(self) -> NDArray[np.int64]:
        return self._columns[:, 0]

    @property
    def prompt_tokens(self) -> NDArray[np.int64]:
        return self._columns[:, 1]

    @property
    def response_tokens(self) -> NDArray[np.int64]:
        return self._columns[:, 2]

    @property
    def trained_tokens(self) -> NDArray[np.int64]:
        return self._columns[:, 3]

    @property
    def failed(self) -> NDArray[np.bool_]:
        return self._columns[:, 4].astype(np.bool_)

    @property
    def uneven(self) -> NDArray[np.bool_]:
        return self._columns[:, 5].astype(np.bool_)

    @property
    def of_episodes(self) -> NDArray[np.bool_]:
        return self._columns[:, 6].astype(np.bool_)

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        if self._advantages is None:
            return iter(self.samples)
        return map(_with_advantage, self.samples, self._advantages)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        sample = self.samples[index]
        return sample if self._advantages is None else _with_advantage(sample, self._advantages[index])


def numbered(names: Iterable[str]) -> NDArray[np.int64]:
    """Each name as a number, 0, 1, ... in order of first appearance: int64 [n]."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


def _row(sample: Sample) -> tuple[int, int, int, bool, bool, bool]:
    prompt, response = len(sample.prompt.token_ids), len(sample.response_ids)
    even = prompt > 0 and response == len(sample.loss_mask) == len(sample.rollout_logprobs)
    return prompt, response, sample.trained_tokens, sample.status is Status.FAILED, not even, bool(sample.episode_id)


def memory(values: Any, dtype: type[np.generic]) -> Memory:
    """That of a NumberArray as it is; of a tuple an array."""
    return np.asarray(values, dtype) if isinstance(values, tuple) else values.content


def _score(sample: Sample) -> float:
    return np.nan if sample.reward is None else sample.reward.score


def _own_advantage(sample: Sample) -> Advantage | None:
    """That of each token where they are told apart."""
    if sample.advantage is None or sample.token_advantages is None:
        return sample.advantage
    return np.array(sample.token_advantages, np.float64)


def _with_advantage(sample: Sample, advantage: Advantage) -> Sample:
    """With several ones their mean as `advantage`, and 0 for no token."""
    if not isinstance(advantage, np.ndarray):
        return sample.changed(advantage=advantage)
    mean = float(advantage.mean()) if len(advantage) else 0.0
    return sample.changed(advantage=mean, token_advantages=tuple(advantage.tolist()))
