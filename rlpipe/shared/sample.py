"""One rollout: what was asked, what was answered, and everything known about it.

Samples are immutable; each stage returns new ones (`dataclasses.replace`). Token ids are never decoded and encoded
again between rollout and training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from rlpipe.shared.turn import Outcome, Turn

if TYPE_CHECKING:
    from rlpipe.shared.expert_routes import Routes
    from rlpipe.shared.number_arrays import Mask, TokenLogprobs, Tokens


class Status(StrEnum):
    """How a response ended."""

    COMPLETED = "completed"  # a stop token or stop string
    TRUNCATED = "truncated"  # the response token limit
    ABORTED = "aborted"  # stopped by us; may be continued
    FAILED = "failed"  # the engine or the generate function gave up


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, tokenized.

    `prompt_id` is unique within its data set and stable across runs and resumes.
    """

    prompt_id: str
    text: str
    token_ids: tuple[int, ...]
    label: str
    dataset: str
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class VersionSpan:
    """`tokens` consecutive response tokens that were sampled by weights of `version`."""

    version: int
    tokens: int


@dataclass(frozen=True)
class Reward:
    """A graded response. `score` enters the advantage; `correct` is None where the grader has no notion of it.

    `failed`: grading timed out or crashed, so that nothing is known of the response, and `reason` tells of that.
    """

    score: float
    correct: bool | None
    reason: str
    components: Mapping[str, float] = field(default_factory=dict)
    failed: bool = False


@dataclass(frozen=True)
class Sample:
    """One token sequence that answers a prompt: an episode of a group, or one branch of an episode.

    An episode is all that one request to a prompt led to. It is one sample unless its context was rewritten on the
    way (edited messages, parallel agents); then it is a tree of token sequences, and each of its leaves, a branch, is a
    sample: `episode_id` is what they share ("": the sample is its own episode), `prompt.token_ids` is what stands
    before the first token that the policy wrote in it, `reward` is that of the episode in all of them. Of tokens that
    lie in several branches one is trained; in the others their `loss_mask` is 0 and `shared_tokens` counts them.

    `loss_mask` and `rollout_logprobs` have one entry per response token; `loss_mask` is 0 for tokens the policy did
    not choose (tool output) or that another branch trains. `rollout_logprobs` are natural logarithms of the engine's
    softmax at `temperature`, before top-k and top-p. `group_id` names the prompt occurrence: samples of one group share
    it and nothing else does.
    `advantage` and `reward` are None until they are computed; `token_advantages`, one per response token, is set only
    by advantage functions that tell tokens apart, and then takes precedence. `routes`: experts that the engine chose,
    where they are replayed: int16 [prompt + response - 1, layers, experts per token]. `turns`: what the policy wrote at
    once, in order; `outcome`: what the environment of the episode, if it has one, tells of it.
    """

    sample_id: str
    group_id: str
    prompt: Prompt
    response_ids: "Tokens"
    response_text: str
    rollout_logprobs: "TokenLogprobs"
    loss_mask: "Mask"
    versions: tuple[VersionSpan, ...]
    status: Status
    engine: int
    temperature: float = 1.0
    reward: Reward | None = None
    advantage: float | None = None
    token_advantages: tuple[float, ...] | None = None
    routes: "Routes | None" = field(default=None, compare=False)
    episode_id: str = ""
    shared_tokens: int = 0
    turns: tuple[Turn, ...] = ()
    outcome: Outcome | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)

    def changed(self, **fields: object) -> Self:
        """`dataclasses.replace` without a call for each field, which for the samples of an iteration take seconds."""
        other, content = object.__new__(type(self)), self.__dict__.copy()
        content.update(fields)
        object.__setattr__(other, "__dict__", content)
        return other

    @property
    def episode(self) -> str:
        """Names the episode; a single sample is one of its own."""
        return self.episode_id or self.sample_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def response_tokens(self) -> int:
        return len(self.response_ids)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def trained_tokens(self) -> int:
        """Response tokens that enter the loss."""
        mask = self.loss_mask  # asked for what it is, because graders' processes go without the numpy of arrays
        return sum(mask) if isinstance(mask, tuple) else mask.ones

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.versions)


Episode = tuple[Sample, ...]
"""The branches of one episode, in the order in which the policy last wrote in them. Most have one."""


def by_episode(samples: Sequence[Sample]) -> list[Episode]:
    """The episodes of `samples`, in the order in which they first appear."""
    if not any(sample.episode_id for sample in samples):
        return list(zip(samples, strict=True))
    episodes: dict[str, list[Sample]] = {}
    for sample in samples:
        episodes.setdefault(sample.episode, []).append(sample)
    return list(map(tuple, episodes.values()))


def is_truncated(episode: Episode) -> bool:
    """Whether a limit cut any branch off, so that what the policy did in the end says little of what it would do."""
    if len(episode) == 1:
        return episode[0].status is Status.TRUNCATED
    return any(sample.status is Status.TRUNCATED for sample in episode)
