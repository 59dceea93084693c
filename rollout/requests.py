"""What goes into an engine and what comes out of it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, Literal

from rlpipe.config.data import EvalConfig, EvalDatasetConfig, SamplingOverrides
from rlpipe.config.rollout import RolloutConfig
from rlpipe.jit_monitor import JitReport
from rlpipe.shared.expert_routes import Routes
from rlpipe.shared.number_arrays import TokenLogprobs, Tokens
from rlpipe.shared.phases import Counter, Span
from rlpipe.shared.sample import Status, VersionSpan
from rollout.partial_response import PartialResponse

DeviceMemory = Literal["weights", "kv_cache"]
"""What of an engine's device memory can be given back, by SGLang's names."""


@dataclass(frozen=True)
class SamplingParameters:
    """How the tokens of one response are chosen.

    `temperature` 0 takes the most likely token. `top_k` -1 keeps all tokens. `stop_token_ids` come on top of the
    end-of-sequence ids in the model's folder; the token that ends a response belongs to the response. `ignore_eos`: no
    token ends one, `stop_token_ids` neither.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def limited(self, max_new_tokens: int, stop: tuple[str, ...]) -> "SamplingParameters":
        """The same with another token limit and further stop strings."""
        if max_new_tokens == self.max_new_tokens and not stop:
            return self
        return replace(self, max_new_tokens=max_new_tokens, stop=self.stop + stop)

    @staticmethod
    def training(config: RolloutConfig, dataset: SamplingOverrides = SamplingOverrides()) -> "SamplingParameters":
        """Of training responses; what `dataset` leaves empty is that of the run."""
        sampling = config.sampling
        return SamplingParameters(
            max_new_tokens=config.max_response_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop=tuple(sampling.stop),
            stop_token_ids=tuple(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
        )._overridden(dataset)

    @staticmethod
    def evaluation(config: RolloutConfig, evaluation: EvalConfig, dataset: EvalDatasetConfig) -> "SamplingParameters":
        """Of an evaluation: the stops of training, the temperature of the evaluation."""
        return SamplingParameters(
            max_new_tokens=evaluation.max_response_tokens or config.max_response_tokens,
            temperature=evaluation.temperature,
            top_p=evaluation.top_p,
            stop=tuple(config.sampling.stop),
            stop_token_ids=tuple(config.sampling.stop_token_ids),
        )._overridden(dataset.sampling)

    def _overridden(self, dataset: SamplingOverrides) -> "SamplingParameters":
        return SamplingParameters(
            max_new_tokens=dataset.max_response_tokens or self.max_new_tokens,
            temperature=self.temperature if dataset.temperature is None else dataset.temperature,
            top_p=self.top_p if dataset.top_p is None else dataset.top_p,
            top_k=self.top_k if dataset.top_k is None else dataset.top_k,
            stop=self.stop if dataset.stop is None else tuple(dataset.stop),
            stop_token_ids=self.stop_token_ids if dataset.stop_token_ids is None else tuple(dataset.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


_SAMPLING_FIELDS = tuple(one.name for one in fields(SamplingParameters))


def sglang_sampling(sampling: SamplingParameters, seed: int) -> dict[str, Any]:
    """SGLang's sampling_params of one request."""
    # Not `asdict`, which copies every value: an engine does this for all requests of an iteration before it begins.
    parameters = {name: getattr(sampling, name) for name in _SAMPLING_FIELDS} | {"sampling_seed": seed}
    parameters["stop"] = list(sampling.stop)
    parameters["stop_token_ids"] = list(sampling.stop_token_ids)
    return parameters


@dataclass(frozen=True)
class GenerateRequest:
    """One response to generate, or to go on with: `partial` counts within `sampling.max_new_tokens`.

    `request_id` is unique among the requests that are not answered yet. `urgent` ones go before all that wait, `spare`
    ones, which may never be needed, behind them.

    `conversation_id`: turns of one conversation, each with the tokens of those before in its prompt, go to the engine
    that has them in its cache. `group_id`: requests with one prompt share an engine; "" for none. `expected_tokens`: of
    what is still to be written, as far as the past tells; None where it does not. All three only move requests, and
    change no answer.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParameters
    seed: int
    partial: PartialResponse = PartialResponse()
    urgent: bool = False
    spare: bool = False
    conversation_id: str = ""
    group_id: str = ""
    expected_tokens: int | None = None

    @property
    def most_tokens(self) -> int:
        """Upper bound of prompt plus response tokens."""
        return len(self.prompt_ids) + self.sampling.max_new_tokens

    @property
    def read_tokens(self) -> int:
        """What an engine computes before the next token of the response."""
        return len(self.prompt_ids) + len(self.partial.token_ids)

    @property
    def likely_tokens(self) -> int:
        """What the request counts with in an engine's load: prompt plus expected tokens, whatever is partial."""
        if self.expected_tokens is None:
            return self.most_tokens
        return min(self.most_tokens, len(self.prompt_ids) + self.expected_tokens)


@dataclass(frozen=True)
class Generation:
    """The answer to one request, with what was partial before. `status` ABORTED: it can go on as another's `partial`.

    `logprobs` has one natural logarithm per token of `token_ids`, under softmax(logits / temperature) before top-k and
    top-p filtering (at temperature 0: softmax(logits)). `seconds` runs from the engine's receipt of the request to its
    last token. `retractions` counts how often a full KV pool made the engine start the request over. `prompt_tokens`
    were read before the first new token, with what was partial and once more after each interruption; `cached_tokens`
    of them needed no computing. `kept_drafts`: entry k counts the verified passes in which k drafted tokens were kept.
    `text`: all of `token_ids` decoded, without special tokens; None where the engine was not asked for it.
    """

    request_id: str
    token_ids: Tokens
    logprobs: TokenLogprobs
    status: Status
    versions: tuple[VersionSpan, ...]
    engine: int
    seconds: float
    retractions: int
    routes: Routes | None = field(default=None, compare=False)
    prompt_tokens: int = field(default=0, compare=False)
    cached_tokens: int = field(default=0, compare=False)
    kept_drafts: tuple[int, ...] = field(default=(), compare=False)
    text: str | None = field(default=None, compare=False)

    @property
    def partial(self) -> PartialResponse:
        return PartialResponse(self.token_ids, self.logprobs, self.versions, self.routes)

    def with_work_of(self, before: "Generation") -> "Generation":
        """With what another engine did for the same request before this one went on."""
        return replace(
            self,
            seconds=before.seconds + self.seconds,
            retractions=before.retractions + self.retractions,
            prompt_tokens=before.prompt_tokens + self.prompt_tokens,
            cached_tokens=before.cached_tokens + self.cached_tokens,
            kept_drafts=added_counts(before.kept_drafts, self.kept_drafts),
        )


def added_counts(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Two histograms as one, as long as the longer of them."""
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))


@dataclass(frozen=True)
class ResponseSpan:
    """When an engine had a request, in seconds of `time.perf_counter` of the driver, and the tokens that it wrote.
    Turns of one conversation have one `response`."""

    response: str
    engine: int
    begin: float
    end: float
    tokens: int


@dataclass(frozen=True)
class EngineHealth:
    """What an engine that has started says of itself.

    `request_tokens` is the longest prompt plus response that it accepts; `start_seconds`: the parts of its start, in
    order; `notes` say what it does otherwise than one may expect.
    """

    engine: int
    request_tokens: int
    kv_cache_tokens: int
    start_seconds: Mapping[str, float]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineUsage:
    """Work of one engine in the `interval_seconds` since the last time it was asked.

    Busy means that at least one request was running. `prompt_tokens`, `cached_tokens` and `kept_drafts` are those of
    the requests' `Generation`s. `first_token_time` is the wall-clock time (of `time.time`) of the
    engine's first token since it started; None before. `draft_seconds` are those of the prediction layer.
    """

    engine: int
    interval_seconds: float
    busy_seconds: float
    response_tokens: int
    requests: int
    retractions: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    kept_drafts: tuple[int, ...] = ()
    first_token_time: float | None = None
    draft_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Response tokens over busy seconds; 0 when the engine was idle."""
        return self.response_tokens / self.busy_seconds if self.busy_seconds else 0.0


@dataclass(frozen=True)
class EngineRecord:
    """What compiled in one engine, and where a trace is wanted, when it generated and received weights, and how full it
    was.

    metrics: of this engine alone, to be reduced over engines as the metric dictionary says.
    """

    engine: int
    host: str
    jit: JitReport
    spans: tuple[Span, ...]
    metrics: dict[str, float] = field(default_factory=dict)
    counters: tuple[Counter, ...] = ()


@dataclass(frozen=True)
class WeightReceipt:
    """What one engine received. `checksums` has one per bucket, of the bytes that arrived
    (`rlpipe.shared.weights.checksum`); it is empty unless `weight_sync.verify` is set. `seconds` leaves out waiting for
    running requests.
    """

    engine: int
    version: int
    seconds: float
    checksums: tuple[str, ...]


def sample_seed(run_seed: int, sample_id: str) -> int:
    """63 bits that depend on nothing but the run's seed and the sample's id."""
    digest = hashlib.sha256(f"{run_seed}/{sample_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
