"""One SGLang engine inside its own Ray actor process."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlpipe.model.hub import model_folder
from rlpipe.shared.collection import imports_kept
from rlpipe.shared.remote import WorkerAddress, register_worker
from rlpipe.shared.weights import WeightBucket, WeightGroup
from rollout import cleanup, kv_memory
from rollout.arguments import EngineSetup
from rollout.engine_counters import EngineCounters
from rollout.engine_memory import EngineMemory
from rollout.engine_start import checked_setup, prepare_process, schedulers_ahead, sglang_arguments
from rollout.engine_usage import UsageClock
from rollout.engine_warm_up import warm_up_engine
from rollout.failures import start_failure
from rollout.healing import Pulse
from rollout.jit_watch import JitWatch
from rollout.memory_release import MemoryRelease
from rollout.pause import GenerationPause
from rollout.requests import (
    DeviceMemory,
    EngineHealth,
    EngineRecord,
    EngineUsage,
    GenerateRequest,
    Generation,
    WeightReceipt,
)
from rollout.response_text import open_tokenizer
from rollout.responses import ResponseWriter
from rollout.scheduler_watch import SchedulerWatch
from rollout.sglang_patches.draft_clock import DraftSeconds
from rollout.sglang_patches.first_token import FirstToken
from rollout.weights.weight_requests import WeightRequests


class Engine:
    """What the driver can ask of an engine; the parts below do it.

    All methods are coroutines of one event loop, which is not the main thread's: see `start_sglang`.

    Weight updates and generation exclude each other: requests that come during an update wait for it. An update waits
    for running requests, so that each response comes from one version of the weights; or it interrupts them, and they
    go on under the new ones, with the keys and values of their first tokens computed again. While the weights are not
    whole, after an update that failed or in place of a lost engine, requests wait, too.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._address = register_worker(f"engine {setup.index}")
        self._sglang: Any = None
        self._responses: ResponseWriter
        self._weights: WeightRequests
        self._memory: MemoryRelease
        self._first_token: FirstToken
        self._draft_seconds: DraftSeconds
        self._counters: EngineCounters
        self._watch = SchedulerWatch(setup.index, setup.log_path)
        self._usage = UsageClock()
        self._pause = GenerationPause(held=setup.awaits_weights)
        self._jit = JitWatch(setup.index, Path(setup.log_path), setup.jit)
        self._memory_peaks = EngineMemory(setup.device)

    async def address(self) -> WorkerAddress:
        """Of this process, for deadlines."""
        return self._address

    async def room_beside_bytes(self) -> float:
        """Device memory that others may take while this engine starts; ask before that."""
        return kv_memory.room_beside_bytes(replace(self._setup, model_path=str(model_folder(self._setup.model_path))))

    async def start(self, room_bytes: float) -> EngineHealth:
        """Loads the model, and warms up where that is asked for. Raises an RlpipeError with one sentence; nothing is
        left behind then.

        room_bytes: what `room_beside_bytes` answered, so that it has: nothing else is answered while SGLang starts.
        """
        begin = time.perf_counter()
        setup = self._setup = checked_setup(self._setup)
        prepare_process(setup)
        self._first_token = FirstToken(Path(setup.log_path))  # beside the log, in a folder that is there by now
        self._draft_seconds = DraftSeconds(Path(setup.log_path))
        with schedulers_ahead(setup) as ahead:
            with imports_kept():
                from rollout.sglang_engine import start_sglang

                arguments, notes = sglang_arguments(setup)
            imported = time.perf_counter()
            try:
                self._sglang = start_sglang(setup.instance, arguments, ahead)
                manager = self._sglang.tokenizer_manager
                self._counters = EngineCounters(manager.get_loads)
                tokenizer = open_tokenizer(setup.model_path) if setup.with_text else None
                self._responses = ResponseWriter(self._sglang, setup, self._pause, self._usage, tokenizer)
                self._weights = WeightRequests(setup.index, manager, self._watch.call)
                self._memory = MemoryRelease(setup, manager, self._watch)
            except Exception as error:
                await self.stop()
                raise start_failure(setup, error) from None
        await self._counters.attach()
        cleanup.remove_opened_files(setup.instance)
        started = time.perf_counter()
        self._watch.start(manager)
        if setup.adapter is not None:
            await self._weights.open_adapter(setup.adapter, setup.engine.tensor_parallel)
        if setup.warm_up:
            # Activations stay in memory until weights come, so that what is free then is free in every iteration.
            await self._watch.call(warm_up_engine(self._sglang, setup, self._responses.request_tokens))
        self._first_token.begin()
        self._draft_seconds.take()
        warm_up_seconds = time.perf_counter() - started
        seconds = {"import": imported - begin, "load": started - imported, "warm_up": warm_up_seconds}
        tokens = self._responses.kv_cache_tokens
        notes += kv_memory.shortage(setup.index, arguments["max_total_tokens"], tokens, manager.server_args.page_size)
        return EngineHealth(setup.index, self._responses.request_tokens, tokens, seconds, notes)

    async def generate(self, requests: list[GenerateRequest]) -> AsyncIterator[list[Generation]]:
        """Yields answers as they finish, several at a time when several are there.

        Raises RolloutError for a request that does not fit (before anything runs) and when the engine dies.
        """
        for request in requests:
            self._responses.check_fits(request)
        self._watch.check()
        self._memory.check_holds("generating", "weights", "kv_cache")
        tasks = self._responses.start(requests)
        self._watch.add(tasks)
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
                self._watch.check()
                yield [task.result() for task in done]
        finally:
            for task in tasks:
                task.cancel()  # does nothing to those that are done
            self._usage.end(len(tasks))
            self._jit.end(len(tasks))
            self._memory_peaks.look()
            self._watch.remove(tasks)

    async def abort(self) -> None:
        """Ends all requests now; they answer with status ABORTED and what they have. Returns when SGLang is idle."""
        self._responses.abort_all()
        async with self._pause.paused(abort=self._responses.interrupt):
            self._watch.check()

    async def release(self, request_ids: tuple[str, ...]) -> None:
        """Has these requests answer now with status ABORTED and what they have, unless they have ended meanwhile."""
        self._watch.check()
        await self._responses.release(request_ids)

    async def sleep(self, parts: tuple[DeviceMemory, ...]) -> float:
        """Gives the device memory of `parts` back once running requests have ended. What was in it is lost.

        Returns the seconds until SGLang had nothing more to do and an empty cache.
        """
        async with self._pause.paused():
            self._watch.check()
            begin, idle_seconds = time.perf_counter(), 0.0
            if new := self._memory.held(parts):
                await self._memory.empty_cache()
                self._usage.note_span("idle", begin)
                idle_seconds = time.perf_counter() - begin
                await self._memory.release(new)
        self._usage.note_span("sleep", begin)
        return idle_seconds

    async def wake(self, parts: tuple[DeviceMemory, ...]) -> None:
        """Takes device memory for `parts` again; weights are undefined until they are received."""
        self._watch.check()
        begin = time.perf_counter()
        await self._memory.resume(parts)
        self._usage.note_span("wake", begin)

    async def join_weight_group(self, group: WeightGroup, reader: int) -> None:
        """Joins as readers `reader` to `reader + tensor_parallel - 1`; returns when all ranks are there."""
        await self._weights.join(group, reader)

    async def leave_weight_group(self, name: str) -> None:
        await self._weights.leave(name)

    async def receive(
        self, plan: tuple[WeightBucket, ...], version: int, group_name: str, in_flight: bool
    ) -> WeightReceipt:
        """Receives all buckets of `plan` in order, then becomes `version`. `in_flight`: interrupt running requests.

        From then on requests are answered with the adapter if `plan` has it, and without if it has none.

        Nothing that older weights computed is used afterwards: the cache of prefixes is emptied first. Raises
        WeightSyncError when a bucket cannot be loaded; requests wait then until an update has come whole.
        """
        async with self._pause.paused(abort=self._responses.interrupt if in_flight else None):
            self._watch.check()
            self._memory.check_holds("receiving weights", "weights")
            begin = time.perf_counter()
            await self._memory.empty_cache()
            self._pause.hold()
            checksums = await self._weights.receive(plan, version, group_name)
            self._responses.version = version
            self._responses.with_adapter = any(bucket.holds_adapters for bucket in plan)
            self._pause.release()
        self._usage.note_span("weight_sync", begin)
        return WeightReceipt(self._setup.index, version, time.perf_counter() - begin, checksums)

    async def probe(self) -> Pulse:
        """Answers at once, whatever SGLang is doing. Raises EngineFailure when the engine has died."""
        self._watch.check()
        return self._responses.pulse()

    async def take_usage(self) -> EngineUsage:
        """Work since the last call."""
        usage = self._usage.take(self._setup.index)
        return replace(usage, first_token_time=self._first_token.time, draft_seconds=self._draft_seconds.take())

    async def take_record(self, iteration: int, keep_spans: bool) -> EngineRecord:
        """What this engine did since the last call, which belongs to `iteration`."""
        spans = self._usage.take_spans(keep_spans)
        report, metrics = self._jit.take(iteration), self._memory_peaks.take()
        counters = self._counters.take(keep_spans)
        return EngineRecord(self._setup.index, socket.gethostname(), report, spans, metrics, counters)

    async def stop(self) -> None:
        """Ends SGLang's processes and removes its files. Idempotent."""
        self._jit.stop()
        self._watch.end(None if self._sglang is None else self._sglang.tokenizer_manager)
        if self._sglang is not None:
            import atexit

            self._counters.stop()
            atexit.unregister(self._sglang.shutdown)
            self._sglang = None
        cleanup.end_children()
        cleanup.remove_files(self._setup.instance)
