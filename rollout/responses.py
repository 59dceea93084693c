"""One response after the other from SGLang: whole ones, interrupted ones that go on, and what they are made of."""

import asyncio
import functools
import time
import uuid
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlpipe.shared.errors import EngineFailure, RolloutError
from rlpipe.shared.expert_routes import Routes
from rlpipe.shared.number_arrays import Logprobs, TokenIds
from rlpipe.shared.replaced_parts import relies_on
from rlpipe.shared.sample import Status
from rollout.arguments import CONTEXT_RESERVE_TOKENS, EngineSetup
from rollout.engine_usage import UsageClock
from rollout.healing import Pulse
from rollout.partial_response import PartialResponse, interrupted, without_overshoot
from rollout.pause import ABORT_EVERY_SECONDS, GenerationPause
from rollout.progress import Progress
from rollout.reported_routes import decoded_routes
from rollout.requests import GenerateRequest, Generation, SamplingParameters, added_counts, sglang_sampling
from rollout.response_text import text_of
from rollout.sglang_patches.request_batches import RequestBatches
from rollout.shared_prompts import SharedPrompts
from rollout.weights.weight_requests import ADAPTER_NAME

relies_on(
    "sglang.srt.entrypoints.engine:Engine._scheduler_init_result",
    why="only the schedulers know the size of their KV pool",
    drop_when="SGLang tells it without an underscore",
)
relies_on(
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.last_receive_tstamp",
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.rid_to_state",
    why="progress of running responses, and silence, while they run",
    drop_when="SGLang answers with partial responses that cost no more than whole ones",
)

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(frozen=True)
class _Work:
    """What SGLang did for a request; see `Generation`."""

    retractions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    kept_drafts: tuple[int, ...] = ()

    def with_more(self, more: "_Work") -> "_Work":
        return _Work(
            self.retractions + more.retractions,
            self.prompt_tokens + more.prompt_tokens,
            self.cached_tokens + more.cached_tokens,
            added_counts(self.kept_drafts, more.kept_drafts),
        )


class ResponseWriter:
    """Of a started SGLang engine. version: of the weights that sample from now on, with_adapter: whether SGLang adds
    its adapter to them; whoever changes these pauses `pause`. Without `tokenizer` responses have no text.

    request_tokens: the longest prompt plus response that SGLang takes. kv_cache_tokens: the size of its pool.
    """

    def __init__(
        self, sglang: Any, setup: EngineSetup, pause: GenerationPause, usage: UsageClock, tokenizer: Any = None
    ) -> None:
        self._manager = sglang.tokenizer_manager
        self._setup = setup
        self._pause = pause
        self._usage = usage
        self._tokenizer = tokenizer
        self._batches = RequestBatches(self._manager)
        self._progress = Progress(self._manager.rid_to_state)
        caches = not self._manager.server_args.disable_radix_cache
        self._prompts = SharedPrompts(self._prefill if caches else None)
        self._aborts = 0
        self._writing: dict[str, asyncio.Task[Generation]] = {}
        self._released: set[str] = set()
        self._tokens_at_once = setup.engine.draft.verified_tokens
        self.version = 0
        self.with_adapter = False
        self.kv_cache_tokens: int = sglang._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]
        # SGLang shortens longer ones silently, or aborts them (Scheduler.init_req_max_new_tokens).
        self.request_tokens = min(self._manager.context_len, self.kv_cache_tokens) - CONTEXT_RESERVE_TOKENS

    def check_fits(self, request: GenerateRequest) -> None:
        """Raises RolloutError for a request that SGLang would shorten or refuse."""
        if request.most_tokens > self.request_tokens:
            raise RolloutError(
                f"request {request.request_id!r}: {len(request.prompt_ids)} prompt tokens and up to "
                f"{request.sampling.max_new_tokens} response tokens exceed the {self.request_tokens} tokens that "
                "engines accept; raise rollout.engine.context_tokens or kv_cache_tokens, lower "
                "data.max_prompt_tokens or rollout.max_response_tokens"
            )
        if not request.prompt_ids:
            raise RolloutError(f"request {request.request_id!r} has an empty prompt; engines need at least one token")

    def start(self, requests: Sequence[GenerateRequest]) -> set[asyncio.Task[Generation]]:
        """A task for each of `requests`, which came together: it answers with the whole response. It waits while
        generation is paused, and goes on after interruptions by new weights; only `abort_all` and `release` end it
        early."""
        self._prompts.expect(requests)
        aborts = self._aborts  # one more may come before the tasks have begun
        tasks = {asyncio.create_task(self._write(request, aborts)): request.request_id for request in requests}
        for task, name in tasks.items():
            self._writing[name] = task
            task.add_done_callback(functools.partial(self._forget, name))
        return set(tasks)

    def _forget(self, name: str, ended: asyncio.Task[Generation]) -> None:
        if self._writing.get(name) is ended:
            del self._writing[name]
            self._released.discard(name)

    async def _write(self, request: GenerateRequest, aborts: int) -> Generation:
        with self._prompts.running(request):
            return await self._whole(request, aborts)

    async def _whole(self, request: GenerateRequest, aborts: int) -> Generation:
        """aborts: how many there had been when it was asked for."""
        begin = time.perf_counter()
        limit, ends, work = request.sampling.max_new_tokens, self._end_ids(request.sampling), _Work()
        # What was partial may be whole: asked for no token, SGLang answers with the log-probability of one.
        partial, status = interrupted(request.partial, ends, (), limit)
        while status is Status.ABORTED and not self._ends_early(request, aborts):
            async with self._pause.running(lambda: self._ends_early(request, aborts)):
                if self._ends_early(request, aborts):
                    break
                partial, status, more = await self._ask(request, partial)
            work = work.with_more(more)
            if status is Status.ABORTED:
                partial, status = interrupted(partial, ends, request.sampling.stop, limit, self._tokens_at_once)
        return Generation(
            request_id=request.request_id,
            token_ids=partial.token_ids,
            logprobs=partial.logprobs,
            status=status,
            versions=partial.versions,
            engine=self._setup.index,
            seconds=time.perf_counter() - begin,
            retractions=work.retractions,
            routes=partial.routes,
            prompt_tokens=work.prompt_tokens,
            cached_tokens=work.cached_tokens,
            kept_drafts=work.kept_drafts,
            text=None if self._tokenizer is None else text_of(partial.token_ids, self._tokenizer),
        )

    async def release(self, request_ids: Collection[str]) -> None:
        """These end as they are, if they are being written: another engine goes on with them. Returns when they have.

        SGLang is told again and again: it passes over what it does not know yet, because it waits for its prompt.
        """
        writing = {self._writing[name] for name in request_ids if name in self._writing}
        self._released.update(name for name in request_ids if name in self._writing)
        while writing:
            self._batches.send()
            for name in self._progress.sglang_ids(self._released):
                self._manager.abort_request(rid=name)
            _, writing = await asyncio.wait(writing, timeout=ABORT_EVERY_SECONDS)

    def _ends_early(self, request: GenerateRequest, aborts: int) -> bool:
        return self._aborts != aborts or request.request_id in self._released

    def interrupt(self) -> None:
        """Has SGLang answer what it runs now as it is; responses go on once generation does."""
        self._batches.send()
        self._manager.abort_request(abort_all=True)

    def abort_all(self) -> None:
        """No response goes on after its next interruption."""
        self._aborts += 1

    def pulse(self) -> Pulse:
        """What running responses have come to."""
        return self._progress.pulse(self.version, self._manager.last_receive_tstamp)

    async def _ask(self, request: GenerateRequest, partial: PartialResponse) -> tuple[PartialResponse, Status, _Work]:
        """Lets SGLang go on from `partial`."""
        from sglang.srt.managers.tokenizer_manager import RequestAbortedError

        parameters = sglang_sampling(request.sampling, request.seed)
        parameters["max_new_tokens"] -= len(partial.token_ids)
        sglang_id = uuid.uuid4().hex
        prefilled_tokens = await self._prompts.ready(request, self.version)
        answers = self._sent(
            rid=sglang_id,
            input_ids=[*request.prompt_ids, *partial.token_ids],
            sampling_params=parameters,
            return_logprob=True,
            return_routed_experts=self._setup.routes_shape is not None,
        )
        try:
            with self._progress.of(request.request_id, sglang_id, partial):
                answer = await anext(answers)
        except RequestAbortedError:  # before it reached the scheduler
            return partial, Status.ABORTED, _Work()
        return self._extended(request, partial, answer, prefilled_tokens)

    async def _prefill(self, request: GenerateRequest) -> int:
        """Leaves keys and values of the prompt but for its last token in the cache; how many had to be computed.

        The one token that SGLang samples is thrown away. It is sampled as those of the request are, for what is in one
        batch is drawn with filters, or by the largest value, only as a whole.
        """
        from sglang.srt.managers.tokenizer_manager import RequestAbortedError

        shared = request.prompt_ids[:-1]
        sampling = replace(request.sampling, max_new_tokens=1, stop=(), stop_token_ids=())
        answers = self._sent(input_ids=list(shared), sampling_params=sglang_sampling(sampling, request.seed))
        try:
            answer = await anext(answers)
        except RequestAbortedError:
            return 0
        return len(shared) - int(answer["meta_info"]["cached_tokens"]) if answer["output_ids"] else 0

    def _sent(self, **fields: Any) -> AsyncIterator[dict[str, Any]]:
        """SGLang's answers to one request, of which the first is the whole one."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(**fields, lora_path=ADAPTER_NAME if self.with_adapter else None)
        answers: AsyncIterator[dict[str, Any]] = self._manager.generate_request(request, None)
        return answers

    def _extended(
        self, request: GenerateRequest, partial: PartialResponse, answer: dict[str, Any], prefilled_tokens: int
    ) -> tuple[PartialResponse, Status, _Work]:
        """`partial` with SGLang's answer behind it. Raises EngineFailure for one that cannot be used.

        prefilled_tokens: of the prompt, computed for this request before SGLang found them in its cache.
        """
        meta, token_ids = answer["meta_info"], TokenIds(answer["output_ids"])
        logprobs = Logprobs(entry[0] for entry in meta.get("output_token_logprobs", ()))
        if len(logprobs) != len(token_ids):
            raise EngineFailure(
                f"engine {self._setup.index}: SGLang answered request {request.request_id!r} with {len(token_ids)} "
                f"tokens and {len(logprobs)} log-probabilities"
            )
        read, retractions = len(request.prompt_ids) + len(partial.token_ids), meta.get("num_retractions", 0)
        cached = max(0, meta.get("cached_tokens", 0) - prefilled_tokens)
        # One without a token was aborted before anything was computed for it.
        kept_drafts = tuple(meta.get("spec_correct_drafts_histogram", ()))
        work = _Work(retractions, read, cached, kept_drafts) if token_ids else _Work(retractions)
        self._usage.count(len(token_ids), work.retractions, work.prompt_tokens, work.cached_tokens, work.kept_drafts)
        routes = self._routes(request, partial, answer)
        extended = partial.extended(token_ids, logprobs, self.version, routes)
        status = _STATUS[meta["finish_reason"]["type"]]
        if self._tokens_at_once > 1:
            ends, limit = self._end_ids(request.sampling), request.sampling.max_new_tokens
            extended, status = without_overshoot(extended, status, len(partial.token_ids), ends, limit)
        return extended, status, work

    def _routes(self, request: GenerateRequest, partial: PartialResponse, answer: dict[str, Any]) -> Routes | None:
        """Routes of the whole sequence. Raises EngineFailure when SGLang leaves out some."""
        shape = self._setup.routes_shape
        if shape is None:
            return None
        tokens = len(request.prompt_ids) + len(partial.token_ids) + len(answer["output_ids"])
        try:
            return decoded_routes(answer["meta_info"], tokens, shape)
        except ValueError as error:
            raise EngineFailure(f"request {request.request_id!r}: expert choices are incomplete: {error}") from None

    def _end_ids(self, sampling: SamplingParameters) -> set[int]:
        """Token ids that end a response."""
        if sampling.ignore_eos:
            return set()
        end_of_sequence = self._manager.model_config.hf_eos_token_id or set()
        return set(sampling.stop_token_ids) | set(end_of_sequence)
