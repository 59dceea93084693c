"""One response in the making: what the policy writes, and what tools answer."""

from typing import TYPE_CHECKING, Protocol

from rlpipe.generation.prompt_requests import PromptRequest
from rlpipe.shared.errors import RolloutError
from rlpipe.shared.sample import Sample, Status, VersionSpan
from rollout.partial_response import PartialResponse, merged_spans
from rollout.reported_routes import joined_routes
from rollout.requests import GenerateRequest, Generation, sample_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Generator(Protocol):
    """What answers requests: `rollout.client.EngineClient`."""

    async def generate(self, request: GenerateRequest) -> Generation: ...


class InterruptedResponse(Exception):
    """The engines were told to abort while this response was written. Not an error: it goes on later."""


class Conversation:
    """Handed to a generate function, which lets the policy `write` and may `insert` text of its own in between.

    Tokens are kept as the engine made them: nothing is decoded and encoded again. `finished` is true once the policy
    ended its response or met the token limit, which inserted tokens count towards.
    """

    def __init__(
        self,
        request: PromptRequest,
        engines: Generator,
        tokenizer: "PreTrainedTokenizerBase",
        run_seed: int,
        partial: PartialResponse = PartialResponse(),
    ) -> None:
        self._prompt_request = request
        self._engines = engines
        self._tokenizer = tokenizer
        self._seed = sample_seed(run_seed, request.sample_id)
        self._response = PartialResponse()
        self._mask: list[int] = []
        self._partial = partial
        self._writes = 0
        self._last: Generation | None = None
        self._seconds = 0.0
        self._retractions = 0
        self.status: Status | None = None

    @property
    def metadata(self) -> dict[str, object]:
        """The other columns of the prompt's row, and `label`."""
        return {**self._prompt_request.prompt.metadata, "label": self._prompt_request.prompt.label}

    @property
    def finished(self) -> bool:
        return self.status is not None

    @property
    def remaining_tokens(self) -> int:
        """How much longer the response may become."""
        return self._prompt_request.sampling.max_new_tokens - len(self._response.token_ids)

    @property
    def partial(self) -> PartialResponse:
        """What an interrupted response can go on from; empty where it has to start again."""
        return self._partial

    async def write(self, stop: tuple[str, ...] = ()) -> str:
        """Lets the policy go on until it ends its response, meets the limit, or has written one of `stop`.

        Returns the new text. Raises RolloutError when the response is finished already.
        """
        if self.finished:
            raise RolloutError(f"sample {self._prompt_request.sample_id}: write() after the response was finished")
        generation = await self._engines.generate(self._request(stop))
        self._seconds += generation.seconds
        self._retractions += generation.retractions
        if generation.status is Status.ABORTED:
            # A later turn cannot be taken up in the middle: what tools answered belongs to the text before it.
            self._partial = generation.partial if self._writes == 0 else PartialResponse()
            raise InterruptedResponse
        self._append(generation)
        text = str(self._tokenizer.decode(list(generation.token_ids), skip_special_tokens=True))
        if generation.status is not Status.COMPLETED or not self._stopped_by(stop, text, generation):
            self.status = generation.status
        return text

    def insert(self, text: str) -> None:
        """Appends the tokens of `text` that the policy did not choose; they are not trained.

        What exceeds the limit is cut off, and the response is finished as truncated.
        """
        token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(token_ids) >= self.remaining_tokens:
            token_ids = token_ids[: self.remaining_tokens]
            self.status = Status.TRUNCATED
        before = self._response
        spans = before.versions  # inserted tokens count to the weights that wrote before, or to the first that write
        if spans:
            spans = merged_spans((*spans, VersionSpan(spans[-1].version, len(token_ids))))
        logprobs = before.logprobs + (0.0,) * len(token_ids)
        self._response = PartialResponse(before.token_ids + tuple(token_ids), logprobs, spans, before.routes)
        self._mask += [0] * len(token_ids)

    def sample(self) -> Sample:
        """The response as it is, ungraded. One without a token has failed: nothing can be learned from it."""
        response = self._response
        text = str(self._tokenizer.decode(list(response.token_ids), skip_special_tokens=True))
        return Sample(
            sample_id=self._prompt_request.sample_id,
            group_id=self._prompt_request.group_id,
            prompt=self._prompt_request.prompt,
            response_ids=response.token_ids,
            response_text=text,
            rollout_logprobs=response.logprobs,
            loss_mask=tuple(self._mask),
            versions=response.versions,
            status=(self.status or Status.COMPLETED) if response.token_ids else Status.FAILED,
            engine=-1 if self._last is None else self._last.engine,
            temperature=self._prompt_request.sampling.temperature,
            routes=response.routes,
            metadata={"generate_seconds": self._seconds, "retractions": self._retractions, "writes": self._writes},
        )

    def _request(self, stop: tuple[str, ...]) -> GenerateRequest:
        sampling = self._prompt_request.sampling.limited(self.remaining_tokens, stop)
        return GenerateRequest(
            request_id=self._prompt_request.sample_id
            if self._writes == 0
            else f"{self._prompt_request.sample_id}.{self._writes}",
            prompt_ids=self._prompt_request.prompt.token_ids + self._response.token_ids,
            sampling=sampling,
            seed=self._seed,
            partial=self._partial if self._writes == 0 else PartialResponse(),
            urgent=self._prompt_request.urgent,
        )

    def _stopped_by(self, stop: tuple[str, ...], text: str, generation: Generation) -> bool:
        """Whether one of `stop`, and not the end of the sequence, ended the turn."""
        ended = generation.token_ids[-1] == self._tokenizer.eos_token_id
        # The token that completes a stop string may carry a blank behind it.
        return not ended and any(text.rstrip().endswith(one) for one in stop)

    def _append(self, generation: Generation) -> None:
        tokens = len(generation.token_ids)
        if len(generation.logprobs) != tokens:
            raise RolloutError(
                f"engine {generation.engine} answered {tokens} tokens and {len(generation.logprobs)} "
                f"log-probabilities for request {generation.request_id!r}; they must be as many"
            )
        before = self._response
        spans = generation.versions
        if before.token_ids and not before.versions:
            spans = (VersionSpan(spans[0].version, len(before.token_ids)), *spans)
        self._response = PartialResponse(
            before.token_ids + generation.token_ids,
            before.logprobs + generation.logprobs,
            merged_spans((*before.versions, *spans)),
            joined_routes(before.routes, generation.routes),
        )
        self._mask += [1] * tokens
        self._writes += 1
        self._last = generation
