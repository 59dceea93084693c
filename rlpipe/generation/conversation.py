"""One response in the making: what the policy writes, and what tools answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from rlpipe.generation.prompt_requests import PromptRequest
from rlpipe.generation.response_seeds import ResponseSeeds, sequence_digest
from rlpipe.generation.stop_strings import before_stop
from rlpipe.shared.errors import RolloutError
from rlpipe.shared.number_arrays import LossMask, Tokens
from rlpipe.shared.sample import Episode, Prompt, Sample, Status, VersionSpan
from rlpipe.shared.turn import Outcome, ToolUse, Turn
from rollout.migration import expected_rest
from rollout.partial_response import PartialResponse, merged_spans
from rollout.reported_routes import joined_routes
from rollout.requests import GenerateRequest, Generation, sample_seed
from rollout.response_text import text_of

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
        self._run_seed = run_seed
        self._seeds = ResponseSeeds(run_seed, request)
        self._digest, self._digested_tokens = b"", 0
        self._response = PartialResponse()
        self._mask = LossMask()
        self._partial = partial
        self._writes = 0
        self._last: Generation | None = None
        self._decoded: tuple[Tokens, str] = ((), "")
        self._seconds = 0.0
        self._retractions = 0
        self._beside: list[Conversation] = []
        self._turns: list[Turn] = []
        self.status: Status | None = None
        self.outcome: Outcome | None = None

    @property
    def metadata(self) -> dict[str, object]:
        """The other columns of the prompt's row, and `label`."""
        return {**self._prompt_request.prompt.metadata, "label": self._prompt_request.prompt.label}

    @property
    def prompt(self) -> Prompt:
        return self._prompt_request.prompt

    @property
    def group_seed(self) -> int:
        """63 bits that all responses of the group share, however often one begins again."""
        return sample_seed(self._run_seed, self._prompt_request.group_id)

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return self._tokenizer

    @property
    def sample_id(self) -> str:
        return self._prompt_request.sample_id

    @property
    def last_token(self) -> int | None:
        """The response's last token id; None while it is empty."""
        return self._response.token_ids[-1] if self._response.token_ids else None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What the policy wrote at once, so far."""
        return tuple(self._turns)

    @property
    def last_turn_ids(self) -> tuple[int, ...]:
        """Token ids of the last turn."""
        return tuple(self._response.token_ids[self._turns[-1].start : self._turns[-1].end])

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

    async def write(self, stop: tuple[str, ...] = (), *, most_tokens: int | None = None, final: bool = True) -> str:
        """Lets the policy go on until it ends its response, meets the limit, or has written one of `stop`.

        most_tokens: a limit of this turn; the response can go on after it. final: what ends the turn before its limit,
        other than one of `stop`, ends the response too. Returns the new text, with the stop string and whatever the
        token that completed it goes on with. Raises RolloutError when the response is finished already.
        """
        if self.finished:
            raise RolloutError(f"sample {self._prompt_request.sample_id}: write() after the response was finished")
        generation = await self._engines.generate(self._request(stop, most_tokens))
        self._seconds += generation.seconds
        self._retractions += generation.retractions
        if generation.status is Status.ABORTED:
            # A later turn cannot be taken up in the middle: what tools answered belongs to the text before it.
            self._partial = generation.partial if self._writes == 0 else PartialResponse()
            raise InterruptedResponse
        self._append(generation)
        if generation.text is not None:
            self._decoded = (generation.token_ids, generation.text)
        text = self._text_of(generation.token_ids)
        if self._ends_response(stop, text, generation, final):
            self.status = generation.status
        elif self.remaining_tokens <= 0:
            self.status = Status.TRUNCATED
        return text

    def replace_prompt(self, text: str, token_ids: Sequence[int]) -> None:
        """Takes another prompt than the row's. Raises RolloutError once something follows it."""
        if self._response.token_ids:
            raise RolloutError(
                f"sample {self._prompt_request.sample_id}: the prompt is replaced after its response began"
            )
        prompt = replace(self._prompt_request.prompt, text=text, token_ids=tuple(token_ids))
        self._prompt_request = replace(self._prompt_request, prompt=prompt)

    def beside(self, name: str) -> "Conversation":
        """Another sequence of the same episode, which begins with the same prompt; `name` ends its sample's id."""
        request = replace(self._prompt_request, sample_id=f"{self._prompt_request.sample_id}.{name}")
        other = Conversation(request, self._engines, self._tokenizer, self._run_seed)
        self._beside.append(other)
        return other

    def insert(self, text: str) -> None:
        """`insert_tokens` of `text`, in which text of special tokens becomes those tokens."""
        self.insert_tokens(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def insert_tokens(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not choose; they are not trained.

        What exceeds the limit is cut off, and the response is finished as truncated.
        """
        if len(token_ids) >= self.remaining_tokens:
            token_ids = token_ids[: self.remaining_tokens]
            self.status = Status.TRUNCATED
        before = self._response
        spans = before.versions  # inserted tokens count to the weights that wrote before, or to the first that write
        if spans and token_ids:
            spans = merged_spans((*spans, VersionSpan(spans[-1].version, len(token_ids))))
        logprobs = before.logprobs + (0.0,) * len(token_ids)
        self._response = PartialResponse(before.token_ids + tuple(token_ids), logprobs, spans, before.routes)
        self._mask += LossMask.filled(0, len(token_ids))

    def describe_turn(
        self,
        index: int = -1,
        *,
        number: int | None = None,
        agent: str = "",
        reward: float | None = None,
        tool_seconds: float = 0.0,
        tools: tuple[ToolUse, ...] = (),
    ) -> None:
        """Says of a turn which of the episode it is and whose, and adds what came of it: a reward to that it has,
        seconds and calls of tools."""
        turn = self._turns[index]
        self._turns[index] = replace(
            turn,
            number=turn.number if number is None else number,
            agent=agent or turn.agent,
            reward=turn.reward if reward is None else (turn.reward or 0.0) + reward,
            tool_seconds=turn.tool_seconds + tool_seconds,
            tools=turn.tools + tools,
        )

    def episode(self) -> Episode:
        """The samples of this sequence and of those beside it in which the policy wrote, the one of its last turn last.

        All have the outcome of this one.
        """
        spoken = [one for one in (self, *self._beside) if one.turns]
        if len(spoken) < 2:
            return (spoken[0].sample().changed(outcome=self.outcome) if spoken else self.sample(),)
        spoken.sort(key=lambda one: one.turns[-1].number)
        return tuple(one.sample().changed(episode_id=self.sample_id, outcome=self.outcome) for one in spoken)

    def sample(self) -> Sample:
        """The response as it is, ungraded. One without a token has failed: nothing can be learned from it."""
        response = self._response
        return Sample(
            sample_id=self._prompt_request.sample_id,
            group_id=self._prompt_request.group_id,
            prompt=self._prompt_request.prompt,
            response_ids=response.token_ids,
            response_text=self._text_of(response.token_ids),
            rollout_logprobs=response.logprobs,
            loss_mask=self._mask,
            versions=response.versions,
            status=(self.status or Status.COMPLETED) if response.token_ids else Status.FAILED,
            engine=-1 if self._last is None else self._last.engine,
            temperature=self._prompt_request.sampling.temperature,
            routes=response.routes,
            turns=self.turns,
            outcome=self.outcome,
            metadata={"generate_seconds": self._seconds, "retractions": self._retractions, "writes": self._writes},
        )

    def _text_of(self, token_ids: Tokens) -> str:
        """Kept until another is asked for: the only turn of a response is all of it, and was decoded by its engine."""
        if self._decoded[0] != token_ids:
            self._decoded = (token_ids, text_of(token_ids, self._tokenizer))
        return self._decoded[1]

    def _request(self, stop: tuple[str, ...], most_tokens: int | None) -> GenerateRequest:
        limit = min(self.remaining_tokens, most_tokens or self.remaining_tokens)
        sampling = self._prompt_request.sampling.limited(limit, stop)
        partial = self._partial if self._writes == 0 else PartialResponse()
        prompt_ids = self._prompt_request.prompt.token_ids + tuple(self._response.token_ids)
        return GenerateRequest(
            request_id=self._prompt_request.sample_id
            if self._writes == 0
            else f"{self._prompt_request.sample_id}.{self._writes}",
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=self._next_seed(prompt_ids),
            partial=partial,
            urgent=self._prompt_request.urgent,
            spare=self._prompt_request.spare,
            conversation_id=self._prompt_request.sample_id,
            group_id=self._prompt_request.group_id,
            expected_tokens=expected_rest(self._prompt_request.expected_tokens, len(partial.token_ids)),
        )

    def _next_seed(self, prompt_ids: tuple[int, ...]) -> int:
        """prompt_ids: all tokens so far. Those up to the end of the last turn are digested once."""
        if self._turns:
            end = len(prompt_ids) - len(self._response.token_ids) + self._turns[-1].end
            self._digest = sequence_digest(self._digest, prompt_ids[self._digested_tokens : end])
            self._digested_tokens = end
        return self._seeds.seed(self._digest, prompt_ids[self._digested_tokens :])

    def _ends_response(self, stop: tuple[str, ...], text: str, generation: Generation, final: bool) -> bool:
        """Whether the response is over, and not only a turn: ended by one of `stop`, or by a limit of its own."""
        if generation.status is Status.TRUNCATED:
            return self.remaining_tokens <= 0
        if generation.status is not Status.COMPLETED:
            return True
        if not final or generation.token_ids[-1] == self._tokenizer.eos_token_id:
            return final
        return before_stop(text, stop)[1] is None

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
        self._mask += LossMask.filled(1, tokens)
        end = len(self._response.token_ids)
        self._turns.append(Turn(end - tokens, end, number=self._writes, model_seconds=generation.seconds))
        self._writes += 1
        self._last = generation
