"""One SGLang engine inside its own Ray actor process."""

import asyncio
import dataclasses
import faulthandler
import os
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.model.hub import model_folder
from rlpipe.shared.descendants import is_stopped
from rlpipe.shared.errors import EngineFailure, RolloutError
from rlpipe.shared.expert_routes import Routes
from rlpipe.shared.remote import WorkerAddress, register_worker
from rlpipe.shared.replaced_parts import relies_on
from rlpipe.shared.sample import Status
from rlpipe.shared.weights import WeightBucket, WeightGroup
from rollout import cleanup, kv_memory
from rollout.arguments import CONTEXT_RESERVE_TOKENS, EngineSetup, kv_cache_tokens, server_arguments
from rollout.engine_counters import EngineCounters
from rollout.engine_memory import EngineMemory
from rollout.engine_usage import UsageClock
from rollout.engine_warm_up import warm_up_engine
from rollout.failures import check_model_folder, log_tail, start_failure
from rollout.healing import Pulse
from rollout.jit_watch import JitWatch
from rollout.model_modules import unneeded_model_modules
from rollout.partial_response import PartialResponse, interrupted
from rollout.pause import GenerationPause
from rollout.progress import Progress
from rollout.reported_routes import decoded_routes
from rollout.requests import (
    DeviceMemory,
    EngineHealth,
    EngineRecord,
    EngineUsage,
    GenerateRequest,
    Generation,
    SamplingParameters,
    WeightReceipt,
    sglang_sampling,
)
from rollout.sglang_patches.first_token import FirstToken
from rollout.sglang_patches.request_batches import RequestBatches
from rollout.sglang_patches.sglang_version import check_sglang_version
from rollout.weights.receiver import VERIFY_VARIABLE
from rollout.weights.weight_requests import WeightRequests

relies_on(
    "sglang.srt.entrypoints.engine:Engine._scheduler_init_result",
    why="only the schedulers know the size of their KV pool",
    drop_when="SGLang tells it without an underscore",
)
relies_on(
    "sglang.srt.managers.tokenizer_manager:TokenizerManager._subprocess_watchdog",
    "sglang.srt.utils.watchdog:SubprocessWatchdog._processes",
    why="the processes to watch; SGLang's own watchdog ends the whole process tree when one is lost",
    drop_when="SGLang fails its requests when a scheduler dies",
)
relies_on(
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.last_receive_tstamp",
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.rid_to_state",
    why="progress of running responses, and silence, while they run",
    drop_when="SGLang answers with partial responses that cost no more than whole ones",
)

relies_on(
    "sglang.srt.distributed.bootstrap:_resolve_dist_init_method",
    texts=("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE",),
    why="a file takes the place of a port where tensor-parallel ranks meet",
    drop_when="an argument of SGLang's server names the place",
)

_MEETING_VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
_LIVENESS_SECONDS = 0.5
_STOPPED_LOOKS = 3  # a debugger may stop a process for a moment
_IDLE_SECONDS = 30.0
_IDLE_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class _Work:
    """What SGLang did for a request; see `Generation`."""

    retractions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def with_more(self, more: "_Work") -> "_Work":
        return _Work(
            self.retractions + more.retractions,
            self.prompt_tokens + more.prompt_tokens,
            self.cached_tokens + more.cached_tokens,
        )


class Engine:
    """All methods are coroutines of one event loop, which is not the main thread's: see `start_sglang`.

    Weight updates and generation exclude each other: requests that come during an update wait for it. An update waits
    for running requests, so that each response comes from one version of the weights; or it interrupts them, and they
    go on under the new ones, with the keys and values of their first tokens computed again. While the weights are not
    whole, after an update that failed or in place of a lost engine, requests wait, too.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._address = register_worker(f"engine {setup.index}")
        self._sglang: Any = None
        self._batches: RequestBatches
        self._weights: WeightRequests
        self._progress: Progress
        self._counters: EngineCounters
        self._version = 0
        self._usage = UsageClock()
        self._start_seconds: dict[str, float] = {}
        self._notes: tuple[str, ...] = ()
        self._request_tokens = 0
        self._pause = GenerationPause(held=setup.awaits_weights)
        self._aborts = 0
        self._running: set[asyncio.Task[Generation]] = set()
        self._calls: set[asyncio.Task[Any]] = set()
        self._death: EngineFailure | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._freed: set[DeviceMemory] = set()
        self._jit = JitWatch(setup.index, Path(setup.log_path), setup.jit)
        self._first_token = FirstToken(Path(setup.log_path))
        self._memory = EngineMemory(setup.device)

    async def address(self) -> WorkerAddress:
        """Of this process, for deadlines."""
        return self._address

    async def start(self) -> EngineHealth:
        """Loads the model, and warms up where that is asked for. Raises an RlpipeError with one sentence; nothing is
        left behind then."""
        begin = time.perf_counter()
        setup = self._setup = dataclasses.replace(self._setup, model_path=str(model_folder(self._setup.model_path)))
        check_sglang_version()
        check_model_folder(setup)
        if setup.device == "cpu":
            kv_memory.check(setup, kv_cache_tokens(setup))
        _use_own_temporary_folder(setup.instance)
        if setup.devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(setup.devices)
        _redirect_output(setup.log_path, keep=setup.restart > 0)
        os.environ[VERIFY_VARIABLE] = "1" if setup.verify_weights else "0"
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(unneeded_model_modules(setup.model_path))
        _ignore_quit_signal()
        cleanup.avoid_named_semaphores()
        from rollout.sglang_engine import server_argument_names, start_sglang

        pools = None if setup.device == "cpu" else kv_memory.gpu_pools(setup)
        arguments = server_arguments(setup, server_argument_names(), pools) | self._supported_kernels()
        imported = time.perf_counter()
        try:
            self._sglang = start_sglang(setup.instance, arguments)
            self._batches = RequestBatches(self._sglang.tokenizer_manager)
            self._weights = WeightRequests(setup.index, self._sglang.tokenizer_manager, self._call)
            self._progress = Progress(self._sglang.tokenizer_manager.rid_to_state)
            self._counters = EngineCounters(self._sglang.tokenizer_manager.get_loads)
        except Exception as error:
            await self.stop()
            raise start_failure(setup, error) from None
        await self._counters.attach()
        cleanup.remove_opened_files(setup.instance)
        self._request_tokens = self._longest_request()
        started = time.perf_counter()
        self._watcher = asyncio.create_task(self._watch_schedulers())
        if setup.warm_up:
            # Activations stay in memory until weights come, so that what is free then is free in every iteration.
            await self._call(warm_up_engine(self._sglang, setup, self._request_tokens))
        self._first_token.begin()
        self._start_seconds = {
            "import": imported - begin,
            "load": started - imported,
            "warm_up": time.perf_counter() - started,
        }
        return await self.health()

    async def generate(self, requests: list[GenerateRequest]) -> AsyncIterator[list[Generation]]:
        """Yields answers as they finish, several at a time when several are there.

        Raises RolloutError for a request that does not fit (before anything runs) and when the engine dies.
        """
        for request in requests:
            self._check_fits(request)
        self._alive()
        self._check_holds("generating", "weights", "kv_cache")
        tasks = {asyncio.create_task(self._generate_one(request)) for request in requests}
        self._running |= tasks
        self._usage.begin(len(tasks))
        self._jit.begin(len(tasks))
        finished: asyncio.Queue[asyncio.Task[Generation]] = asyncio.Queue()
        for task in tasks:
            task.add_done_callback(finished.put_nowait)
        owed = len(tasks)
        try:
            while owed:
                done = [await finished.get()]
                while not finished.empty():
                    done.append(finished.get_nowait())
                owed -= len(done)
                yield [self._result(task) for task in done]
        finally:
            for task in tasks:
                task.cancel()  # does nothing to those that are done
            self._usage.end(len(tasks))
            self._jit.end(len(tasks))
            self._memory.look()
            self._running -= tasks

    async def abort(self) -> None:
        """Ends all requests now; they answer with status ABORTED and what they have. Returns when SGLang is idle."""
        self._aborts += 1
        async with self._pause.paused(abort=self._abort_in_sglang):
            self._alive()

    async def sleep(self, parts: tuple[DeviceMemory, ...]) -> float:
        """Gives the device memory of `parts` back once running requests have ended. What was in it is lost.

        Returns the seconds until SGLang had nothing more to do and an empty cache.
        """
        async with self._pause.paused():
            self._alive()
            begin, idle_seconds = time.perf_counter(), 0.0
            if new := [part for part in parts if part not in self._freed]:
                from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

                await self._wait_until_idle()
                self._usage.note_span("idle", begin)
                idle_seconds = time.perf_counter() - begin
                request = ReleaseMemoryOccupationReqInput(tags=list(new))
                await self._call(self._sglang.tokenizer_manager.release_memory_occupation(request, None))
                self._freed.update(new)
        self._usage.note_span("sleep", begin)
        return idle_seconds

    async def wake(self, parts: tuple[DeviceMemory, ...]) -> None:
        """Takes device memory for `parts` again; weights are undefined until they are received."""
        self._alive()
        begin = time.perf_counter()
        if back := [part for part in parts if part in self._freed]:
            from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

            request = ResumeMemoryOccupationReqInput(tags=list(back))
            await self._call(self._sglang.tokenizer_manager.resume_memory_occupation(request, None))
            self._freed.difference_update(back)
        self._usage.note_span("wake", begin)

    async def join_weight_group(self, group: WeightGroup, rank: int) -> None:
        """Joins as ranks `rank` to `rank + tensor_parallel - 1`; returns when all ranks are there."""
        await self._weights.join(group, rank)

    async def leave_weight_group(self, name: str) -> None:
        await self._weights.leave(name)

    async def receive(
        self, plan: tuple[WeightBucket, ...], version: int, group_name: str, in_flight: bool
    ) -> WeightReceipt:
        """Receives all buckets of `plan` in order, then becomes `version`. `in_flight`: interrupt running requests.

        Raises WeightSyncError when a bucket cannot be loaded; requests wait then until an update has come whole.
        """
        async with self._pause.paused(abort=self._abort_in_sglang if in_flight else None):
            self._alive()
            self._check_holds("receiving weights", "weights")
            begin = time.perf_counter()
            await self._wait_until_idle()
            self._pause.hold()
            checksums = await self._weights.receive(plan, version, group_name)
            self._version = version
            self._pause.release()
        self._usage.note_span("weight_sync", begin)
        return WeightReceipt(self._setup.index, version, time.perf_counter() - begin, checksums)

    async def probe(self) -> Pulse:
        """Answers at once, whatever SGLang is doing. Raises EngineFailure when the engine has died."""
        self._alive()
        return self._progress.pulse(self._version, self._sglang.tokenizer_manager.last_receive_tstamp)

    async def health(self) -> EngineHealth:
        """Raises EngineFailure when the engine has died."""
        self._alive()
        return EngineHealth(
            engine=self._setup.index,
            version=self._version,
            running_requests=sum(not task.done() for task in self._running),
            request_tokens=self._request_tokens,
            kv_cache_tokens=self._sglang._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"],
            start_seconds=self._start_seconds,
            notes=self._notes,
        )

    async def take_usage(self) -> EngineUsage:
        """Work since the last call."""
        return dataclasses.replace(self._usage.take(self._setup.index), first_token_time=self._first_token.time)

    async def take_record(self, iteration: int, keep_spans: bool) -> EngineRecord:
        """What this engine did since the last call, which belongs to `iteration`."""
        spans = self._usage.take_spans(keep_spans)
        report, metrics = self._jit.take(iteration), self._memory.take()
        counters = self._counters.take(keep_spans)
        return EngineRecord(self._setup.index, socket.gethostname(), report, spans, metrics, counters)

    async def stop(self) -> None:
        """Ends SGLang's processes and removes its files. Idempotent."""
        self._jit.stop()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._sglang is not None:
            import atexit

            atexit.unregister(self._sglang.shutdown)
            self._sglang.tokenizer_manager._subprocess_watchdog.stop()
            self._counters.stop()
            self._sglang = None
            self._death = EngineFailure(f"engine {self._setup.index} was stopped")
        cleanup.end_children()
        cleanup.remove_files(self._setup.instance)

    async def _generate_one(self, request: GenerateRequest) -> Generation:
        begin, aborts = time.perf_counter(), self._aborts
        limit, ends, work = request.sampling.max_new_tokens, self._end_ids(request.sampling), _Work()
        # What was partial may be whole: asked for no token, SGLang answers with the log-probability of one.
        partial, status = interrupted(request.partial, ends, (), limit)
        while status is Status.ABORTED and self._aborts == aborts:
            async with self._pause.running():
                if self._aborts != aborts:
                    break
                partial, status, more = await self._ask(request, partial)
            work = work.with_more(more)
            if status is Status.ABORTED:
                partial, status = interrupted(partial, ends, request.sampling.stop, limit)
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
        )

    async def _ask(self, request: GenerateRequest, partial: PartialResponse) -> "tuple[PartialResponse, Status, _Work]":
        """Lets SGLang go on."""
        from sglang.srt.managers.io_struct import GenerateReqInput
        from sglang.srt.managers.tokenizer_manager import RequestAbortedError

        parameters = sglang_sampling(request.sampling, request.seed)
        parameters["max_new_tokens"] -= len(partial.token_ids)
        sglang_id = uuid.uuid4().hex
        answers = self._sglang.tokenizer_manager.generate_request(
            GenerateReqInput(
                rid=sglang_id,
                input_ids=[*request.prompt_ids, *partial.token_ids],
                sampling_params=parameters,
                return_logprob=True,
                return_routed_experts=self._setup.routes_shape is not None,
            ),
            None,
        )
        try:
            with self._progress.of(request.request_id, sglang_id, partial):
                answer = await anext(answers)
        except RequestAbortedError:  # before it reached the scheduler
            return partial, Status.ABORTED, _Work()
        meta = answer["meta_info"]
        logprobs = tuple(entry[0] for entry in meta.get("output_token_logprobs", ()))
        token_ids = tuple(answer["output_ids"])
        read = len(request.prompt_ids) + len(partial.token_ids) if token_ids else 0  # 0: aborted before it ran
        work = _Work(meta.get("num_retractions", 0), read, meta.get("cached_tokens", 0) if token_ids else 0)
        if len(logprobs) != len(token_ids):
            raise EngineFailure(
                f"engine {self._setup.index}: SGLang answered request {request.request_id!r} with {len(token_ids)} "
                f"tokens and {len(logprobs)} log-probabilities"
            )
        self._usage.count(len(token_ids), work.retractions, work.prompt_tokens, work.cached_tokens)
        routes = self._routes(request, partial, answer)
        extended = partial.extended(token_ids, logprobs, self._version, routes)
        return extended, _STATUS[meta["finish_reason"]["type"]], work

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
        end_of_sequence = self._sglang.tokenizer_manager.model_config.hf_eos_token_id or set()
        return set(sampling.stop_token_ids) | set(end_of_sequence)

    def _supported_kernels(self) -> dict[str, str]:
        """Arguments in place of SGLang's own choices that cannot run here; the user's choice stays."""
        if self._setup.device == "cpu" or "attention_backend" in self._setup.engine.sglang:
            return {}
        from rollout.sglang_patches.attention_kernel import supported_attention

        backend, note = supported_attention()
        self._notes = (note,) if note else ()
        return {"attention_backend": backend} if backend else {}

    def _abort_in_sglang(self) -> None:
        self._batches.send()
        self._sglang.tokenizer_manager.abort_request(abort_all=True)

    async def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Awaits SGLang's answer, or raises when SGLang dies."""
        self._alive()
        task = asyncio.create_task(coroutine)
        self._calls.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            self._alive()
            raise
        finally:
            self._calls.discard(task)

    def _result(self, task: "asyncio.Task[Generation]") -> Generation:
        if self._death is not None:
            raise self._death
        return task.result()

    def _longest_request(self) -> int:
        """SGLang shortens longer ones silently, or aborts them (Scheduler.init_req_max_new_tokens)."""
        info = self._sglang._scheduler_init_result.scheduler_infos[0]
        context = self._sglang.tokenizer_manager.context_len
        return min(context, info["max_total_num_tokens"]) - CONTEXT_RESERVE_TOKENS

    def _check_fits(self, request: GenerateRequest) -> None:
        if request.most_tokens > self._request_tokens:
            raise RolloutError(
                f"request {request.request_id!r}: {len(request.prompt_ids)} prompt tokens and up to "
                f"{request.sampling.max_new_tokens} response tokens exceed the {self._request_tokens} tokens that "
                "engines accept; raise rollout.engine.context_tokens or kv_cache_tokens, lower "
                "data.max_prompt_tokens or rollout.max_response_tokens"
            )
        if not request.prompt_ids:
            raise RolloutError(f"request {request.request_id!r} has an empty prompt; engines need at least one token")

    def _check_holds(self, call: str, *parts: DeviceMemory) -> None:
        for part in parts:
            if part in self._freed:
                raise RolloutError(
                    f"engine {self._setup.index} has given the device memory of its {part} back, so {call} is not "
                    f"possible: call RolloutPool.wake(({part!r},)) first"
                )

    async def _wait_until_idle(self) -> None:
        """SGLang asserts that it is idle when memory goes, which it is a moment after its last answer. Empties its
        cache."""
        end = time.perf_counter() + _IDLE_SECONDS
        while not (await self._call(self._sglang.tokenizer_manager.flush_cache())).success:
            if time.perf_counter() > end:
                raise EngineFailure(
                    f"engine {self._setup.index} is still busy {_IDLE_SECONDS:g} seconds after its last answer, so its "
                    f"cache cannot be emptied; see {self._setup.log_path}"
                )
            await asyncio.sleep(_IDLE_POLL_SECONDS)

    def _alive(self) -> None:
        if self._death is not None:
            raise self._death

    async def _watch_schedulers(self) -> None:
        """Fails all running requests when a process of SGLang dies or stops; SGLang itself would let them wait
        forever."""
        processes = self._sglang.tokenizer_manager._subprocess_watchdog._processes
        stopped = 0
        while all(process.is_alive() for process in processes) and stopped < _STOPPED_LOOKS:
            await asyncio.sleep(_LIVENESS_SECONDS)
            stopped = stopped + 1 if any(is_stopped(process.pid) for process in processes) else 0
        self._death = EngineFailure(
            f"engine {self._setup.index} died: {_what_happened(processes)}; log: {self._setup.log_path}; its last "
            f"lines:\n{log_tail(self._setup.log_path)}"
        )
        for task in self._running | self._calls:
            task.cancel()


def _what_happened(processes: Sequence[Any]) -> str:
    for process in processes:
        if not process.is_alive():
            return f"SGLang's process {process.pid} ended with exit code {process.exitcode}"
    stopped = [process.pid for process in processes if is_stopped(process.pid)]
    return f"SGLang's process {stopped[0] if stopped else processes[0].pid} was stopped and does not go on"


def _redirect_output(path: str, keep: bool) -> None:
    """Lets this process and its children print into `path`; keep: behind what a lost engine printed."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if keep else os.O_TRUNC), 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _ignore_quit_signal() -> None:
    """A failing child sends SIGQUIT to its parent, which by default would end this process without a word.

    Python sets signal handlers in the main thread only; faulthandler sets one from any thread. Its dump is not wanted.
    """
    faulthandler.register(signal.SIGQUIT, file=os.open(os.devnull, os.O_WRONLY), all_threads=False)


def _use_own_temporary_folder(instance: str) -> None:
    """Sockets and scratch files of SGLang go into a folder that can be removed as a whole."""
    cleanup.remove_abandoned()
    folder = cleanup.claim_directory(instance)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = str(folder)
    # SGLang's ranks meet in a file: of a port that it chooses, any address of the machine would listen, seconds later.
    os.environ[_MEETING_VARIABLE] = (folder / "store").as_uri()
