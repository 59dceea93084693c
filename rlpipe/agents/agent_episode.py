"""One episode as its agent sees it: requests in, sampled messages out, every token kept."""

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlpipe.agents.chat_rendering import ChatRenderer
from rlpipe.agents.chat_requests import ChatRequest, CompletionRequest, Wanted
from rlpipe.agents.messages import Message, MessageReader, chain, digest_of, first_difference
from rlpipe.agents.refusal import Refusal
from rlpipe.agents.token_tree import Node, TokenTree
from rlpipe.agents.tool_call_formats import Parsed, split_reasoning
from rlpipe.data.chat_messages import CalledTool
from rlpipe.generation.conversation import Generator
from rlpipe.generation.prompt_requests import PromptRequest
from rlpipe.generation.response_seeds import ResponseSeeds
from rlpipe.generation.stop_strings import before_stop
from rlpipe.shared.errors import RlpipeError
from rlpipe.shared.sample import Episode, Status
from rollout.partial_response import PartialResponse, merged_spans
from rollout.requests import GenerateRequest, Generation

_PREFIX = re.compile(r"^(chatcmpl-|cmpl-|msg_)")  # of an answer's id, by the path that gave it
_LONG_TEXT = 50_000  # characters that take the tokenizer longer than other requests should wait


@dataclass(frozen=True)
class Reply:
    """One choice of an answer. `finish_reason` as OpenAI has it; `stop_string`: the one that ended it."""

    message: Message
    generation: Generation
    finish_reason: str
    stop_string: str | None


@dataclass(frozen=True)
class Answer:
    """`prompt_tokens` of which `kept_tokens` were kept from earlier turns. `waited_seconds`: for engines.
    `answer_id`: without the prefix that OpenAI and Anthropic give it."""

    answer_id: str
    replies: tuple[Reply, ...]
    prompt_tokens: int
    kept_tokens: int
    waited_seconds: float

    @property
    def completion_tokens(self) -> int:
        return sum(len(reply.generation.token_ids) for reply in self.replies)


@dataclass(frozen=True)
class _Continued:
    """Where a request goes on: after `node` (None: at a beginning), with these tokens of context."""

    node: Node | None
    context_ids: tuple[int, ...]
    messages: tuple[Message, ...]


class AgentEpisode:
    """Serves the requests of one agent, which may come side by side; lives in one event loop.

    counts: of the run, by their names in the metric dictionary without `agent/`; they are added to. limit_tokens: of a
    prompt with its response, as a pack holds it. formats: whether requests for JSON are served (`response_format`).
    """

    def __init__(
        self,
        request: PromptRequest,
        engines: Generator,
        renderer: ChatRenderer,
        run_seed: int,
        limit_tokens: int,
        counts: "Counter[str]",
        formats: Literal["refused", "unenforced"] = "refused",
    ) -> None:
        self.request = request
        self.divergences: list[str] = []
        self.error: RlpipeError | None = None
        self.interrupted = asyncio.Event()
        self.reader = MessageReader()
        self._engines = engines
        self._renderer = renderer
        self._seeds = ResponseSeeds(run_seed, request)
        self.limit_tokens = limit_tokens
        self._counts = counts
        self._formats = formats
        self._tree = TokenTree()
        self._histories: dict[bytes, Node] = {}
        self._completions: list[tuple[str, Node]] = []
        self._asked: Counter[tuple[bytes, tuple[int, ...], int | None]] = Counter()
        self._may_sample = asyncio.Event()
        self._may_sample.set()
        self._closed = False
        self._begun = False
        self._partial: dict[str, PartialResponse] = {}

    async def chat(self, request: ChatRequest) -> Answer:
        """Raises Refusal for what cannot be sampled."""
        self._check_served(request)
        histories = chain(request.options.digest, request.messages)
        place = await self._place(request, histories)
        opening: tuple[int, ...] = ()
        if request.tool_choice == "required" and self._renderer.tool_calls is not None:
            opening = tuple(self._renderer.plain_token_ids(self._renderer.tool_calls.opening(request.named_tool)))
        generations, prompt_tokens, seconds = await self._sample(place, opening, request.wanted)
        answer_id, replies = uuid.uuid4().hex, []
        for generation in generations:
            reply = self._reply(request, opening, generation, histories[-1])
            messages = (*place.messages, reply.message)
            (history,) = chain(histories[-1], [reply.message])
            node = Node(place.node, place.context_ids + opening, generation, answer_id, messages, history)
            self._histories[history] = self._add(node)
            replies.append(reply)
        return Answer(answer_id, tuple(replies), prompt_tokens, self._kept_tokens(place), seconds)

    async def prompt_tokens(self, request: ChatRequest) -> int:
        """Of the prompt that `chat` would have, however long, without the opening of a call that is required. Nothing
        is noted of it. Raises Refusal as `chat` does for what is not served."""
        self._check_served(request)
        kept = self._kept(chain(request.options.digest, request.messages))
        text = None if kept is None else self._text_after(request, *kept)
        if kept is None or text is None:
            return len(await self._encoded(self._renderer.prompt(request.messages, request.options)))
        node = kept[1]
        return node.tokens + len(_without_end(await self._encoded(text), node))

    async def complete(self, request: CompletionRequest) -> Answer:
        """As `chat` for a prompt without messages. A prompt that begins with an earlier one and its response goes on
        from the kept tokens."""
        place, shown = self._completion_place(request.prompt)
        generations, prompt_tokens, seconds = await self._sample(place, (), request.wanted)
        answer_id, replies = uuid.uuid4().hex, []
        for generation in generations:
            text, ended_by = before_stop(self._renderer.text_of(generation.token_ids), request.wanted.stop)
            message = Message("assistant", text)
            node = self._add(Node(place.node, place.context_ids, generation, answer_id, (*place.messages, message)))
            for special in (True, False):  # agents are shown no special tokens, and may write them themselves
                self._completions.append((shown + self._renderer.text_of(generation.token_ids, special), node))
            reason = "stop" if ended_by is not None or generation.status is Status.COMPLETED else "length"
            replies.append(Reply(message, generation, reason, ended_by))
        return Answer(answer_id, tuple(replies), prompt_tokens, self._kept_tokens(place), seconds)

    def samples(self) -> Episode:
        """What was sampled so far; none before the first response."""
        request = self.request
        samples = self._tree.samples(request.sample_id, request.group_id, request.prompt, request.sampling.temperature)
        about = {"divergences": tuple(self.divergences)} if self.divergences else {}
        return tuple(
            replace(
                sample,
                prompt=replace(sample.prompt, text=self._renderer.text_of(sample.prompt.token_ids, special=True)),
                metadata={**sample.metadata, **about},
            )
            for sample in samples
        )

    @property
    def has_sampled(self) -> bool:
        """Whether the policy has written anything that counts."""
        return bool(self._tree.nodes)

    def reward_turns(self, rewards: Mapping[str, float]) -> float:
        """Notes what single responses earned, by the ids of their answers; each choice of an answer earns it. Returns
        the sum. Raises KeyError with an id that no answer has."""
        nodes: dict[str, list[Node]] = {}
        for node in self._tree.nodes:
            nodes.setdefault(node.answer_id, []).append(node)
        for answer_id, reward in rewards.items():
            for node in nodes[_PREFIX.sub("", answer_id)]:
                node.reward = reward
        return sum(node.reward or 0.0 for node in self._tree.nodes)

    @property
    def written(self) -> PartialResponse:
        """All that was sampled so far, interrupted responses included."""
        written = self._tree.written
        for partial in self._partial.values():
            written = PartialResponse(
                written.token_ids + partial.token_ids,
                written.logprobs + partial.logprobs,
                merged_spans((*written.versions, *partial.versions)),
            )
        return written

    def take_back(self, answer: Answer) -> None:
        """The agent never saw this answer, so the responses were not part of its episode."""
        gone = {id(reply.generation) for reply in answer.replies}
        self._tree.forget(lambda node: id(node.generation) in gone)
        self._histories = {key: node for key, node in self._histories.items() if id(node.generation) not in gone}
        self._completions = [one for one in self._completions if id(one[1].generation) not in gone]
        self._counts["abandoned_responses"] += len(gone)

    def hold(self) -> None:
        """From now on nothing is sampled; requests wait."""
        self._may_sample.clear()

    def suspend(self) -> None:
        """The same, and whoever looks after the episode is told."""
        self.hold()
        self.interrupted.set()

    def resume(self) -> None:
        """Requests that waited go on, also in the middle of a response."""
        self.interrupted.clear()
        self._may_sample.set()

    def close(self) -> None:
        """Later requests are refused."""
        self._closed = True
        self._may_sample.set()

    def _check_served(self, request: ChatRequest) -> None:
        if request.response_format is not None and self._formats == "refused":
            raise Refusal(
                "response_format: the policy is sampled without a grammar, since what is learned belongs to what it "
                "writes by itself; leave it out, or set rollout.generate.agent.response_format: unenforced"
            )
        if request.options.tools and self._renderer.tool_calls is None:
            raise Refusal("the chat template of this policy shows no tools, or wants calls in a format not known here")

    async def _place(self, request: ChatRequest, histories: Sequence[bytes]) -> _Continued:
        """After the longest dialogue that was sampled and that the messages begin with."""
        found = self._kept(histories)
        if self._renderer.holds_special_text(request.messages[found[0] + 1 if found else 0 :]):
            self._counts["special_text_requests"] += 1
        if found is not None:
            index, node = found
            new = request.messages[index + 1 :]
            text = self._text_after(request, index, node)
            if text is not None:
                ids = await self._token_ids(text)
                self._note_branch(request, node)
                return _Continued(node, _without_end(ids, node), new)
            self._note_divergence(
                "the chat template cannot go on after the kept reply" if new else "the reply came back"
            )
        elif self._begun:
            self._note_divergence(self._difference(request))
        ids = await self._token_ids(self._renderer.prompt(request.messages, request.options))
        self._begun = True
        return _Continued(None, ids, request.messages)

    def _kept(self, histories: Sequence[bytes]) -> tuple[int, Node] | None:
        """The longest dialogue that was sampled among `histories`, with its place there."""
        places = range(len(histories) - 1, -1, -1)
        return next(((index, node) for index in places if (node := self._histories.get(histories[index]))), None)

    def _text_after(self, request: ChatRequest, index: int, node: Node) -> str | None:
        """Of the messages after `index`, of which `node` is the dialogue; None where there are none, or the chat
        template cannot go on there."""
        new = request.messages[index + 1 :]
        return self._renderer.continuation(node.dialogue(), new, request.options) if new else None

    def _note_branch(self, request: ChatRequest, node: Node) -> None:
        if node.claimed:
            self._note_divergence(self._difference(request))
        else:
            self._counts["continued_requests"] += 1
        node.claim()

    def _note_divergence(self, why: str) -> None:
        self._counts["divergences"] += 1
        self.divergences.append(why)

    def _difference(self, request: ChatRequest) -> str:
        """From the dialogue that has most messages in common with the request."""
        start = request.options.digest
        leaves = [leaf.dialogue() for leaf in self._tree.leaves()]
        given = chain(start, request.messages)
        kept = max(leaves, key=lambda dialogue: _common(chain(start, dialogue), given), default=[])
        if not kept:
            return "another request came before the first was answered"
        if all(one.fingerprint == other.fingerprint for one, other in zip(kept, request.messages, strict=False)):
            if len(request.messages) <= len(kept):
                return f"the request with {len(request.messages)} messages came again, after {len(kept)} were kept"
            return "tools or template arguments are others than before"
        return first_difference(kept, request.messages)

    def _completion_place(self, prompt: str | tuple[int, ...]) -> tuple[_Continued, str]:
        shown = prompt if isinstance(prompt, str) else self._renderer.text_of(prompt, special=True)
        if isinstance(prompt, tuple):
            matches = [(node.token_ids(), node) for _, node in self._completions]
            found = [(ids, node) for ids, node in matches if prompt[: len(ids)] == ids and len(prompt) > len(ids)]
            ids, node = max(found, key=lambda one: len(one[0]), default=((), None))
            rest: tuple[int, ...] = prompt[len(ids) :]
        else:
            texts = [one for one in self._completions if shown.startswith(one[0]) and len(shown) > len(one[0])]
            text, node = max(texts, key=lambda one: len(one[0]), default=("", None))
            rest = tuple(self._renderer.plain_token_ids(shown[len(text) :]))
        if node is not None and not node.claimed:
            self._counts["continued_requests"] += 1
            node.claim()
        elif self._begun:
            self._note_divergence("the prompt begins with none of the kept texts, or with one that went on already")
        self._begun = True
        return _Continued(node, rest, (Message("user", shown),)), shown

    async def _token_ids(self, text: str) -> tuple[int, ...]:
        if self._renderer.surely_exceeds(len(text), self.limit_tokens):
            self._counts["context_overflows"] += 1
            raise _no_room(f"more than {self.limit_tokens}", self.limit_tokens)
        return await self._encoded(text)

    async def _encoded(self, text: str) -> tuple[int, ...]:
        if len(text) > _LONG_TEXT:
            return tuple(await asyncio.to_thread(self._renderer.token_ids, text))
        return tuple(self._renderer.token_ids(text))

    async def _sample(
        self, place: _Continued, opening: tuple[int, ...], wanted: Wanted
    ) -> tuple[list[Generation], int, float]:
        """The responses, the tokens of their prompt, and the seconds for which engines were waited for."""
        kept = place.node.token_ids() if place.node is not None else ()
        prompt_ids = kept + place.context_ids + opening
        room = self.limit_tokens - len(prompt_ids)
        if room <= 0:
            self._counts["context_overflows"] += 1
            if place.node is not None:
                place.node.cut_off = True
            raise _no_room(f"{len(prompt_ids)}", self.limit_tokens)
        if any(value != getattr(self.request.sampling, name, None) for name, value in wanted.sampling):
            self._counts["overridden_sampling"] += 1
        limit = min(room, wanted.max_tokens or room)
        read = (b"" if place.node is None else place.node.digest, place.context_ids + opening)
        self._counts["requests"] += 1
        first = self._asked[*read, wanted.seed]
        self._asked[*read, wanted.seed] += wanted.choices
        requests = [
            GenerateRequest(
                request_id=f"{self.request.sample_id}.{uuid.uuid4().hex[:12]}",
                prompt_ids=prompt_ids,
                sampling=self.request.sampling.limited(limit, wanted.stop),
                seed=self._seeds.seed(*read, first + index, wanted.seed),
                urgent=self.request.urgent,
                spare=self.request.spare,
                conversation_id=self.request.sample_id,
                group_id=self.request.group_id,
            )
            for index in range(wanted.choices)
        ]
        begin = time.perf_counter()
        generations = await asyncio.gather(*map(self._generate, requests))
        return generations, len(prompt_ids), time.perf_counter() - begin

    async def _generate(self, request: GenerateRequest) -> Generation:
        """The whole response, over interruptions."""
        while True:
            await self._may_sample.wait()
            if self._closed:
                raise Refusal("this episode is over", status=410, code="episode_over")
            try:
                generation = await self._engines.generate(request)
            except RlpipeError as error:
                self.error = self.error or error
                self.interrupted.set()
                raise Refusal("the engines failed, and the run ends", status=500, code="engine_failure") from None
            self._partial.pop(request.request_id, None)
            if generation.status is not Status.ABORTED:
                return generation
            request = replace(request, partial=generation.partial)
            self._partial[request.request_id] = generation.partial
            self.suspend()

    def _reply(self, request: ChatRequest, opening: tuple[int, ...], generation: Generation, history: bytes) -> Reply:
        renderer = self._renderer
        text, ended_by = before_stop(
            renderer.text_of(opening + generation.token_ids), request.wanted.stop, len(renderer.text_of(opening))
        )
        reasoning, content = split_reasoning(text, renderer.opens_reasoning(request.options) and not opening)
        parsed = Parsed(content)
        if request.parses_calls and renderer.tool_calls is not None:
            parsed = renderer.tool_calls.parse(content, request.options.tools)
        if parsed.problem:
            self._counts["malformed_tool_calls"] += 1
        self._counts["tool_calls"] += len(parsed.tool_calls)
        if request.response_format is not None and not parsed.tool_calls:
            self._counts["unenforced_formats"] += 1
            self._counts["unfit_responses"] += not request.response_format.fits(parsed.content)
        name = digest_of([history.hex(), tuple(generation.token_ids)]).hex()[:12]
        calls = tuple(
            CalledTool(call.name, call.arguments, f"call_{name}{index}") for index, call in enumerate(parsed.tool_calls)
        )
        reason = "length" if generation.status is Status.TRUNCATED and ended_by is None else "stop"
        if calls:
            reason = "tool_calls"
        return Reply(Message("assistant", parsed.content, calls, reasoning), generation, reason, ended_by)

    def _add(self, node: Node) -> Node:
        generation = node.generation
        node.cut_off = node.tokens >= self.limit_tokens and generation.status is Status.TRUNCATED
        self._counts["sampled_tokens"] += len(generation.token_ids)
        return self._tree.add(node)

    def _kept_tokens(self, place: _Continued) -> int:
        return 0 if place.node is None else place.node.tokens


def _without_end(context_ids: tuple[int, ...], node: Node) -> tuple[int, ...]:
    """What comes after the kept tokens, less the end of the turn where the policy wrote it itself."""
    ended = context_ids[:1] == node.generation.token_ids[-1:]
    return context_ids[1:] if ended else context_ids


def _common(kept: Sequence[bytes], given: Sequence[bytes]) -> int:
    return sum(before == now for before, now in zip(kept, given, strict=False))


def _no_room(tokens: str, limit: int) -> Refusal:
    return Refusal(
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens} tokens.",
        code="context_length_exceeded",
    )
