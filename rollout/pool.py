"""The driver's handle on all rollout engines."""

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray

from rlpipe.config.root import Config
from rlpipe.flops.route_shape import route_shape
from rlpipe.jit_monitor import worker_caches
from rlpipe.model.hub import HubName
from rlpipe.model.model_reader import describe_model
from rlpipe.shared.errors import DeadlineError, EngineFailure, RlpipeError, RolloutError, WeightSyncError
from rlpipe.shared.interrupts import raise_if_requested
from rlpipe.shared.remote import cluster_accelerator, deadline_error, on_node
from rlpipe.shared.replaced_parts import relies_on
from rlpipe.shared.weights import WeightBucket, WeightGroup
from rollout.arguments import EngineSetup
from rollout.cleanup import end_engine, engine_directory, remove_files
from rollout.client import EngineClient
from rollout.engine_environment import DeviceKind, engine_environment
from rollout.failures import log_tail
from rollout.fleet import EngineState, Fleet, RunningEngine
from rollout.healing import Fault
from rollout.requests import (
    DeviceMemory,
    EngineHealth,
    EngineRecord,
    EngineUsage,
    GenerateRequest,
    Generation,
    SamplingParameters,
)
from rollout.supervisor import Supervisor

relies_on(
    "ray.core.src.ray.raylet.raylet",
    texts=("Some common causes", "Worker exit detail: "),
    why="Ray's message on a lost process is a page; one line of it says why",
    drop_when="RayActorError has the reason as an attribute",
)

_STOP_SECONDS = 30.0
_LOOK_EVERY_SECONDS = 0.5
_IN_VAIN_SECONDS = 20.0
_QUEUE_SHARE = 1.25  # requests sent to an engine, over those that it runs at a time


@dataclass(frozen=True)
class EngineCalls:
    """One call to several engines, to be given to `RolloutPool.gather` or `collect`."""

    engines: tuple[RunningEngine, ...]
    references: tuple[Any, ...]


class RolloutPool:
    """Engines as Ray actors named `rollout-engine-<pool>e<index>`.

    An engine that is lost, be it while it starts, is replaced by another, as far as `fault.engine_restarts` allows;
    calls leave it out meanwhile. The failure that no restart is left for is raised by all calls, as an RlpipeError of
    one sentence (plus the last lines of the log); afterwards only `stop` is useful. Every call has a deadline.
    """

    def __init__(
        self,
        config: Config,
        setups: Sequence[EngineSetup],
        placement: Any = None,
        say: Callable[[str], None] = lambda _: None,
        on_fault: Callable[[Fault], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._placement = placement
        self._groups: dict[RunningEngine, WeightGroup] = {}
        self._ready: tuple[EngineHealth, ...] = ()
        self._sent = False
        self._stopped = False
        self._fleet = Fleet([self.launch(setup) for setup in setups], config.fault, self._last_words)
        self._supervisor = Supervisor(
            self._fleet, self, config.fault, config.deadlines.start_seconds, say=say, on_fault=on_fault
        )
        self._supervisor.start()

    @classmethod
    def start(
        cls,
        config: Config,
        model_path: str,
        placement: Any = None,
        log_directory: str | None = None,
        say: Callable[[str], None] = lambda _: None,
        on_fault: Callable[[Fault], None] = lambda _: None,
    ) -> Self:
        """Starts the engines of `config` in the background; `wait_until_ready` waits for them.

        `placement` has `.strategy(index)`, a Ray scheduling strategy, `.devices_of(index)` and `.gpus_per_bundle`;
        without it Ray places the engines anywhere, on a CPU. Each engine prints into
        `log_directory/rollout_engine_<index>.log`. `say` gets lines for the user, and `on_fault` every healed engine,
        in another thread.
        """
        run = uuid.uuid4().hex[:8]
        gpus = placement.gpus_per_bundle if placement is not None else 0
        setups = [
            _setup(config, index, model_path, "cuda" if gpus else "cpu", f"{run}e{index}", log_directory)
            for index in range(config.rollout.engines)
        ]
        if placement is not None:
            setups = [replace(setup, devices=placement.devices_of(setup.index)) for setup in setups]
        return cls(config, setups, placement, say, on_fault)

    def launch(self, setup: EngineSetup) -> RunningEngine:
        """Starts one engine in the background."""
        gpus = self._placement.gpus_per_bundle if self._placement is not None else 0
        return RunningEngine(setup, _actor(setup, self._placement, gpus))

    def wait_until_ready(self) -> tuple[EngineHealth, ...]:
        """Blocks until every engine can answer. Raises what an engine finds wrong, for instance ResourceError.

        Called again, it tells how the engines were when they had started.
        """
        self._ready = self._ready or tuple(self._fleet.wait_until_up())
        return self._ready

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        deadline_seconds: float,
        on_finished: Callable[[Generation], None] | None = None,
    ) -> list[Generation]:
        """Answers in the order of `requests`; `on_finished` sees each as soon as it is there.

        Raises RolloutError for requests that no engine accepts or when no restart is left, DeadlineError when late.
        """
        ids = {request.request_id for request in requests}
        if len(ids) != len(requests):
            raise RolloutError(f"{len(requests) - len(ids)} of {len(requests)} requests share an id with another")
        client = self.client()

        async def answer(request: GenerateRequest) -> Generation:
            generation = await client.generate(request)
            if on_finished is not None:
                on_finished(generation)
            return generation

        async def answer_all() -> list[Generation]:
            return await asyncio.wait_for(asyncio.gather(*map(answer, requests)), deadline_seconds)

        try:
            return asyncio.run(answer_all())
        except TimeoutError:
            raise self.late(client, deadline_seconds) from None
        finally:
            client.close()

    def client(self) -> EngineClient:
        """A way to ask the engines from an event loop. Close it when it is done."""
        rollout = self._config.rollout
        same_bits = rollout.mode == "sync" and rollout.engine.deterministic
        keep_tokens = not same_bits and not self._config.algorithm.routing_replay
        return EngineClient(
            self._fleet, self._requests_per_engine(), self.translate, keep_tokens, rollout.request_routing == "prefix"
        )

    def late(self, client: EngineClient, deadline_seconds: float) -> DeadlineError:
        """The error for engines that owe `client` an answer, with their stacks."""
        engines = self._fleet.all()
        busy = [address for index in client.busy_engines() if (address := engines[index].address) is not None]
        if not busy:
            lost = ", ".join(str(engine.failure or engine.state.value) for engine in engines)
            return DeadlineError(
                f"rollout: no engine served within {deadline_seconds:g} seconds ({lost}); raise the deadline in the "
                "`deadlines` section if that is too short for restarting one"
            )
        return deadline_error(busy, deadline_seconds, "rollout")

    def serving(self) -> list[RunningEngine]:
        """Engines that answer requests."""
        return self._fleet.serving()

    def up(self) -> list[RunningEngine]:
        """These, and those that wait for weights."""
        self._fleet.check()
        return self._fleet.up()

    def awaiting_weights(self) -> list[RunningEngine]:
        """Engines in the places of lost ones: they answer nothing before `serve`."""
        self._fleet.check()
        return self._fleet.awaiting_weights()

    def serve(self, engines: Sequence[RunningEngine]) -> None:
        """They have received the weights that they are to sample with."""
        self._fleet.serve(engines)

    def report(self, engine: RunningEngine, failure: EngineFailure) -> None:
        """The engine is lost, as far as the caller can see."""
        self._fleet.report(engine, failure)

    @property
    def holds_sent_weights(self) -> bool:
        """Whether an update was begun: weights of the model's folder are too old from then on."""
        return self._sent

    def pause_requests(self) -> None:
        """Requests wait from now on, those that engines have are answered."""
        self._fleet.pause_requests(True)

    def resume_requests(self) -> None:
        self._fleet.pause_requests(False)

    def pause_restarts(self) -> None:
        """No engine is started from now on, for instance because the actor needs the memory; returns once none is
        starting."""
        self._supervisor.pause_restarts()

    def resume_restarts(self) -> None:
        self._supervisor.resume_restarts()

    def take_fault_counts(self) -> dict[str, float]:
        """What lost engines cost since the last call, by the name of the metric without its area."""
        return self._fleet.counts.take()

    def join_weight_groups(
        self, groups: Sequence[WeightGroup], engines: Sequence[RunningEngine] | None = None
    ) -> EngineCalls:
        """A call that ends when all ranks, the senders' included, have joined.

        One group for all `engines` (by default all that are up), or one for each.
        """
        engines = self.up() if engines is None else engines
        if len(groups) == 1:
            size = self._config.rollout.engine.tensor_parallel
            places = [(groups[0], groups[0].senders + place * size) for place in range(len(engines))]
        else:
            places = [(group, group.senders) for group in groups]
        self._groups = {engine: group for engine, (group, _) in zip(engines, places, strict=True)}
        return EngineCalls(
            tuple(engines),
            tuple(
                engine.actor.join_weight_group.remote(group, rank)
                for engine, (group, rank) in zip(engines, places, strict=True)
            ),
        )

    def sleep(self, parts: Sequence[DeviceMemory]) -> float:
        """Engines give the device memory of `parts` back, after running requests have ended; its content is lost.

        Until `wake`, calls that need it raise RolloutError. Returns the seconds in which the slowest one became idle.
        """
        seconds = self._config.deadlines.rollout_seconds
        return max(self._call("sleep", tuple(parts), seconds=seconds, phase="putting to sleep"), default=0.0)

    def wake(self, parts: Sequence[DeviceMemory]) -> None:
        """Engines take device memory for `parts` again; weights have to be sent after it."""
        self._call("wake", tuple(parts), seconds=self._config.deadlines.weight_sync_seconds, phase="waking")

    def start_receiving(self, plan: tuple[WeightBucket, ...], version: int, in_flight: bool = False) -> EngineCalls:
        """A call for each joined engine's WeightReceipt of `plan`; the sender may begin right after it.

        Engines finish their running requests first, or interrupt them where `in_flight`; these then go on, and later
        requests are answered, with the new weights.
        """
        if not self._groups:
            raise WeightSyncError("engines have not joined a weight group; call join_weight_groups first")
        self._sent = True
        return EngineCalls(
            tuple(self._groups),
            tuple(
                engine.actor.receive.remote(plan, version, group.name, in_flight)
                for engine, group in self._groups.items()
            ),
        )

    def gather(self, calls: EngineCalls, deadline_seconds: float, phase: str) -> list[Any]:
        """Results of `calls`, one per engine, or the first error of one."""
        results: dict[RunningEngine, Any] = {}
        for engine, result in self._answers(calls, deadline_seconds, phase):
            if isinstance(result, EngineFailure):
                self._fleet.report(engine, result)
                self._fleet.check()
            if isinstance(result, RlpipeError):
                raise result
            results[engine] = result
        return [results[engine] for engine in calls.engines]

    def collect(
        self, calls: EngineCalls, deadline_seconds: float, phase: str, in_vain: Callable[[], bool] = lambda: False
    ) -> dict[RunningEngine, Any]:
        """Results of the engines that have one, and errors that are not the loss of an engine, as values.

        Engines that fail or are late are lost. in_vain: whether what they wait for will not come; they have some
        seconds more to notice it then.
        """
        results: dict[RunningEngine, Any] = {}
        for engine, result in self._answers(calls, deadline_seconds, phase, in_vain):
            if isinstance(result, EngineFailure | DeadlineError):
                self._fleet.report(engine, EngineFailure(str(result)))
            else:
                results[engine] = result
        return results

    def leave_weight_groups(self) -> None:
        """Those engines leave that are there yet."""
        up = set(self._fleet.up())
        here = [(engine, group) for engine, group in self._groups.items() if engine in up]
        self._groups = {}
        references = tuple(engine.actor.leave_weight_group.remote(group.name) for engine, group in here)
        calls = EngineCalls(tuple(engine for engine, _ in here), references)
        self.collect(calls, self._config.deadlines.weight_sync_seconds, "leaving the weight group")

    def health(self) -> tuple[EngineHealth, ...]:
        """Of the engines that are up."""
        return tuple(self._ask("health", seconds=self._config.deadlines.start_seconds, phase="asking for health"))

    def take_usage(self) -> tuple[EngineUsage, ...]:
        """Each engine's work since the last call."""
        return tuple(self._ask("take_usage", seconds=self._config.deadlines.start_seconds, phase="asking for usage"))

    def take_records(self, iteration: int, keep_spans: bool = False) -> tuple[EngineRecord, ...]:
        """What each engine did since the last call, which belongs to `iteration`. keep_spans: of what follows, keep
        every stretch for a trace."""
        seconds = self._config.deadlines.start_seconds
        return tuple(self._ask("take_record", iteration, keep_spans, seconds=seconds, phase="asking for records"))

    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the engines' actors, on their nodes."""
        return tuple(engine.address.pid for engine in self._fleet.all() if engine.address is not None)

    def instances(self) -> tuple[str, ...]:
        """Names of the engines' temporary files."""
        return tuple(engine.setup.instance for engine in self._fleet.all())

    def stop(self) -> None:
        """Ends all engine processes and removes their files, whatever state they are in. Idempotent."""
        if self._stopped or not ray.is_initialized():
            return
        self._stopped = True
        self._supervisor.stop()
        engines = self._fleet.all()
        answering = [engine for engine in engines if engine.state is not EngineState.LOST]
        if answering:
            references = [engine.actor.stop.remote() for engine in answering]
            ray.wait(references, num_returns=len(references), timeout=_STOP_SECONDS)
        for engine in engines:
            ray.kill(engine.actor)
            if engine.address is None:
                remove_files(engine.setup.instance)
            elif not engine.ended:
                self._on_node(engine, end_engine, engine.address.pid, engine.setup.instance)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def translate(self, engine: RunningEngine, error: ray.exceptions.RayError) -> RlpipeError:
        """An engine's own error, or the sentence for an engine that answers nothing."""
        if isinstance(error, ray.exceptions.RayTaskError):
            cause = error.cause
            if isinstance(cause, RlpipeError):
                return type(cause)(*cause.args)
            return EngineFailure(f"engine {engine.index} failed: {_last_line(error)}; log: {engine.setup.log_path}")
        if isinstance(error, ray.exceptions.RayActorError):
            return EngineFailure(
                f"engine {engine.index} died: its process ended unexpectedly ({_reason(error)}); log: "
                f"{engine.setup.log_path}"
            )
        return EngineFailure(f"Ray failed while talking to engine {engine.index}: {_last_line(error)}")

    def _ask(self, method: str, *arguments: Any, seconds: float, phase: str) -> list[Any]:
        """The same, with the failure raised that no restart is left for."""
        answers = self._call(method, *arguments, seconds=seconds, phase=phase)
        self._fleet.check()
        return answers

    def _call(self, method: str, *arguments: Any, seconds: float, phase: str) -> list[Any]:
        """Answers of all engines that are up, without those that fail meanwhile."""
        engines = self._fleet.up()
        references = tuple(getattr(engine.actor, method).remote(*arguments) for engine in engines)
        answers = self.collect(EngineCalls(tuple(engines), references), seconds, f"{phase} (engines)")
        for answer in answers.values():
            if isinstance(answer, RlpipeError):
                raise answer
        return [answers[engine] for engine in engines if engine in answers]

    def _answers(
        self, calls: EngineCalls, deadline_seconds: float, phase: str, in_vain: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[RunningEngine, Any]]:
        """Each engine with its result as it comes, or with the error in place of one."""
        engines = dict(zip(calls.references, calls.engines, strict=True))
        pending, end, shortened = list(calls.references), time.monotonic() + deadline_seconds, False
        while pending:
            left = max(0.0, end - time.monotonic())
            ready, pending = ray.wait(pending, num_returns=1, timeout=min(_LOOK_EVERY_SECONDS, left))
            raise_if_requested()
            if not shortened and in_vain():
                shortened, end = True, min(end, time.monotonic() + _IN_VAIN_SECONDS)
            for reference in ready:
                try:
                    result = ray.get(reference)
                except ray.exceptions.RayError as error:
                    result = self.translate(engines[reference], error)
                yield engines[reference], result
            if not ready and time.monotonic() >= end:
                late = [engines[reference] for reference in pending]
                addresses = [engine.address for engine in late if engine.address is not None]
                too_late = deadline_error(addresses, deadline_seconds, phase)
                yield from ((engine, too_late) for engine in late)
                return

    def _requests_per_engine(self) -> int:
        return int(self._config.rollout.engine.max_running_requests * _QUEUE_SHARE) + 1

    def _last_words(self, engine: RunningEngine, failure: EngineFailure) -> RlpipeError:
        """The failure as the end of the run, with what the engine printed last."""
        first, _, lines = str(failure).partition("\n")
        if not lines:
            first += "; its last lines:"
            lines = self._on_node(engine, log_tail, engine.setup.log_path)
        allowed = self._config.fault.engine_restarts
        why = f"no restart is left, fault.engine_restarts allows {allowed} within an hour: " if allowed else ""
        return RolloutError(f"{why}{first}\n{lines}")

    def _on_node(self, engine: RunningEngine, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function on the machine of an engine whose process may be gone."""
        if engine.address is None:
            return function(*arguments)
        try:
            return on_node(engine.address.node_id, function, *arguments, timeout_seconds=_STOP_SECONDS)
        except ray.exceptions.RayError as error:
            return f"(no answer from node {engine.address.node_id}: {type(error).__name__})"


def _setup(
    config: Config, index: int, model_path: str, device: DeviceKind, instance: str, log_directory: str | None
) -> EngineSetup:
    rollout = config.rollout
    directory = Path(log_directory) if log_directory else engine_directory(instance)
    return EngineSetup(
        index=index,
        model_path=_from_anywhere(model_path),
        device=device,
        engine=rollout.engine,
        request_tokens=config.data.max_prompt_tokens + config.longest_response_tokens,
        needs_tokenizer=config.uses_stop_strings,
        verify_weights=config.weight_sync.verify,
        memory_saver=device == "cuda" and config.ray.shares_memory(gpus=True),
        seed=config.seed,
        instance=instance,
        routes_shape=_routes_shape(config, model_path),
        log_path=str((directory / f"rollout_engine_{index}.log").resolve()),
        jit=config.jit,
        warm_up=_sampling_kinds(config) if config.jit.warms_up(device == "cuda") else (),
    )


def _from_anywhere(model_path: str) -> str:
    """A folder's absolute path; the name of a hub model, which each engine finds in its own node's cache, as it is."""
    path = Path(model_path)
    return str(path.resolve()) if path.exists() or HubName.parse(model_path) is None else model_path


def _sampling_kinds(config: Config) -> tuple[SamplingParameters, ...]:
    """The different ways in which tokens are chosen in this run."""
    training = [SamplingParameters.training(config.rollout, one.sampling) for one in config.data.train]
    evaluation = [SamplingParameters.evaluation(config.rollout, config.eval, one) for one in config.eval.datasets]
    kinds = [replace(one, max_new_tokens=0, stop=(), stop_token_ids=()) for one in (*training, *evaluation)]
    return tuple(dict.fromkeys(kinds))


def _routes_shape(config: Config, model_path: str) -> tuple[int, int] | None:
    """Layers and experts per token, where the actor repeats the engines' expert choices."""
    if not config.algorithm.routing_replay:
        return None
    shape = route_shape(describe_model(model_path).shape)
    return shape.layers, shape.experts_per_token


def _actor(setup: EngineSetup, placement: Any, gpus: int) -> Any:
    from rollout.engine import Engine

    environment = engine_environment(
        setup.device, setup.engine.tensor_parallel, engine_directory(setup.instance), os.environ
    )
    options: dict[str, Any] = {
        "name": f"rollout-engine-{setup.instance}",
        "num_cpus": 1 if placement is not None else 0,
        "num_gpus": gpus,
        "max_restarts": 0,
        "runtime_env": {"env_vars": environment | worker_caches(setup.jit.cache_directory, cluster_accelerator())},
    }
    if placement is not None:
        options["scheduling_strategy"] = placement.strategy(setup.index)
    return ray.remote(Engine).options(**options).remote(setup)


def _reason(error: ray.exceptions.RayActorError) -> str:
    """What Ray's long message says of why, without its list of common causes."""
    for line in str(error).splitlines():
        if "exit" in line.lower() or "killed" in line.lower():
            return line.partition("Worker exit detail: ")[2].partition(" Some common causes")[0].strip(" .") or line
    return _last_line(error)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
