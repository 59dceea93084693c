"""The driver's handle on all rollout engines."""

import asyncio
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray

from rlpipe.config.root import Config
from rlpipe.flops.route_shape import route_shape
from rlpipe.jit_monitor import worker_caches
from rlpipe.model.hf_config import load_model_shape
from rlpipe.model.hub import HubName
from rlpipe.shared.errors import DeadlineError, RlpipeError, RolloutError, WeightSyncError
from rlpipe.shared.remote import WorkerAddress, cluster_accelerator, deadline_error, gather
from rlpipe.shared.weights import WeightBucket, WeightGroup
from rollout.arguments import EngineSetup
from rollout.cleanup import engine_directory, remove_files
from rollout.client import EngineClient
from rollout.engine_environment import DeviceKind, engine_environment
from rollout.failures import log_tail
from rollout.requests import (
    DeviceMemory,
    EngineHealth,
    EngineRecord,
    EngineUsage,
    GenerateRequest,
    Generation,
    SamplingParameters,
)

_STOP_SECONDS = 30.0
_QUEUE_SHARE = 1.25  # requests sent to an engine, over those that it runs at a time


class RolloutPool:
    """Engines as Ray actors named `rollout-engine-<pool>e<index>`.

    Every method that talks to engines has a deadline and raises an RlpipeError of one sentence (plus the last lines of
    the log where an engine died); afterwards only `stop` is useful.
    """

    def __init__(self, setups: Sequence[EngineSetup], actors: Sequence[Any], config: Config) -> None:
        self._setups = tuple(setups)
        self._actors = tuple(actors)
        self._config = config
        # Asked for first: an engine that hangs while it starts cannot answer, and its stack is wanted then.
        self._address_references = [actor.address.remote() for actor in actors]
        self._starting = [actor.start.remote() for actor in actors]
        self._workers: list[WorkerAddress] = []
        self._groups: tuple[WeightGroup, ...] = ()
        self._stopped = False

    @classmethod
    def start(cls, config: Config, model_path: str, placement: Any = None, log_directory: str | None = None) -> Self:
        """Starts the engines of `config` in the background; `wait_until_ready` waits for them.

        `placement` has `.strategy(index)`, a Ray scheduling strategy, `.devices_of(index)` and `.gpus_per_bundle`;
        without it Ray places the engines anywhere, on a CPU. Each engine prints into
        `log_directory/rollout_engine_<index>.log`.
        """
        run = uuid.uuid4().hex[:8]
        gpus = placement.gpus_per_bundle if placement is not None else 0
        setups = [
            _setup(config, index, model_path, "cuda" if gpus else "cpu", f"{run}e{index}", log_directory)
            for index in range(config.rollout.engines)
        ]
        if placement is not None:
            setups = [replace(setup, devices=placement.devices_of(setup.index)) for setup in setups]
        actors = [_actor(setup, placement, gpus) for setup in setups]
        return cls(setups, actors, config)

    def wait_until_ready(self) -> tuple[EngineHealth, ...]:
        """Blocks until every engine can answer. Raises the first engine's error, for instance ResourceError."""
        deadline = self._config.deadlines.start_seconds
        self._addresses(deadline)
        return tuple(self.gather(self._starting, deadline, "starting rollout engines"))

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        deadline_seconds: float,
        on_finished: Callable[[Generation], None] | None = None,
    ) -> list[Generation]:
        """Answers in the order of `requests`; `on_finished` sees each as soon as it is there.

        Raises RolloutError for requests that no engine accepts or an engine that dies, DeadlineError when late.
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

    def client(self) -> EngineClient:
        """A way to ask the engines from an event loop."""
        return EngineClient(self._actors, self._requests_per_engine(), self._translate)

    def late(self, client: EngineClient, deadline_seconds: float) -> DeadlineError:
        """The error for engines that owe `client` an answer, with their stacks."""
        addresses = self._addresses(deadline_seconds)
        return deadline_error([addresses[index] for index in client.busy_engines()], deadline_seconds, "rollout")

    def join_weight_groups(self, groups: Sequence[WeightGroup]) -> list[Any]:
        """References that are ready when all ranks, the senders' included, have joined. Give them to `gather`.

        One group for all engines, or one for each.
        """
        if len(groups) == 1:
            size = self._config.rollout.engine.tensor_parallel
            places = [(groups[0], groups[0].senders + index * size) for index in range(len(self._actors))]
        else:
            places = [(group, group.senders) for group in groups]
        self._groups = tuple(group for group, _ in places)
        return [
            actor.join_weight_group.remote(group, rank)
            for actor, (group, rank) in zip(self._actors, places, strict=True)
        ]

    def sleep(self, parts: Sequence[DeviceMemory]) -> float:
        """Engines give the device memory of `parts` back, after running requests have ended; its content is lost.

        Until `wake`, calls that need it raise RolloutError. Returns the seconds in which the slowest one became idle.
        """
        references = [actor.sleep.remote(tuple(parts)) for actor in self._actors]
        return max(self.gather(references, self._config.deadlines.rollout_seconds, "putting engines to sleep"))

    def wake(self, parts: Sequence[DeviceMemory]) -> None:
        """Engines take device memory for `parts` again; weights have to be sent after it."""
        references = [actor.wake.remote(tuple(parts)) for actor in self._actors]
        self.gather(references, self._config.deadlines.weight_sync_seconds, "waking engines")

    def start_receiving(self, plan: tuple[WeightBucket, ...], version: int, in_flight: bool = False) -> list[Any]:
        """References to each engine's WeightReceipt of `plan`; the sender may begin right after this call.

        Engines finish their running requests first, or interrupt them where `in_flight`; these then go on, and later
        requests are answered, with the new weights.
        """
        if not self._groups:
            raise WeightSyncError("engines have not joined a weight group; call join_weight_groups first")
        return [
            actor.receive.remote(plan, version, group.name, in_flight)
            for actor, group in zip(self._actors, self._groups, strict=True)
        ]

    def gather(self, references: Sequence[Any], deadline_seconds: float, phase: str) -> list[Any]:
        """Results of `references`, one per engine, or the error of the first engine that has one."""
        try:
            return gather(references, self._addresses(deadline_seconds), deadline_seconds, phase)
        except ray.exceptions.RayError as error:
            raise self._translate(error) from None

    def leave_weight_groups(self) -> None:
        if self._groups:
            references = [
                actor.leave_weight_group.remote(group.name)
                for actor, group in zip(self._actors, self._groups, strict=True)
            ]
            self.gather(references, self._config.deadlines.weight_sync_seconds, "leaving the weight group")
            self._groups = ()

    def health(self) -> tuple[EngineHealth, ...]:
        """Raises RolloutError when an engine has died."""
        references = [actor.health.remote() for actor in self._actors]
        return tuple(self.gather(references, self._config.deadlines.start_seconds, "asking for engines' health"))

    def take_usage(self) -> tuple[EngineUsage, ...]:
        """Each engine's work since the last call."""
        references = [actor.take_usage.remote() for actor in self._actors]
        return tuple(self.gather(references, self._config.deadlines.start_seconds, "asking for engines' usage"))

    def take_records(self, iteration: int, keep_spans: bool = False) -> tuple[EngineRecord, ...]:
        """What each engine did since the last call, which belongs to `iteration`. keep_spans: of what follows, keep
        every stretch for a trace."""
        references = [actor.take_record.remote(iteration, keep_spans) for actor in self._actors]
        return tuple(self.gather(references, self._config.deadlines.start_seconds, "asking for engines' records"))

    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the engines' actors, on their nodes."""
        return tuple(worker.pid for worker in self._addresses(self._config.deadlines.start_seconds))

    def instances(self) -> tuple[str, ...]:
        """Names of the engines' temporary files."""
        return tuple(setup.instance for setup in self._setups)

    def stop(self) -> None:
        """Ends all engine processes and removes their files, whatever state they are in. Idempotent."""
        if self._stopped or not ray.is_initialized():
            return
        self._stopped = True
        ray.wait([actor.stop.remote() for actor in self._actors], num_returns=len(self._actors), timeout=_STOP_SECONDS)
        for actor in self._actors:
            ray.kill(actor)
        self._sweep()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _addresses(self, deadline_seconds: float) -> list[WorkerAddress]:
        if not self._workers:
            try:
                self._workers = ray.get(self._address_references, timeout=deadline_seconds)
            except ray.exceptions.GetTimeoutError:
                raise RolloutError(
                    f"Ray did not place {len(self._actors)} rollout engines within {deadline_seconds:g} seconds; "
                    "see `ray status` for free CPUs and GPUs"
                ) from None
            except ray.exceptions.RayError as error:
                raise self._translate(error) from None
        return self._workers

    def _requests_per_engine(self) -> int:
        return int(self._config.rollout.engine.max_running_requests * _QUEUE_SHARE) + 1

    def _translate(self, error: ray.exceptions.RayError) -> RlpipeError:
        """An engine's own error, or the sentence for an engine whose process is gone."""
        if isinstance(error, ray.exceptions.RayTaskError):
            cause = error.cause
            return type(cause)(*cause.args) if isinstance(cause, RlpipeError) else RolloutError(_last_line(error))
        if isinstance(error, ray.exceptions.ActorDiedError):
            index = self._index(error)
            path = self._setups[index].log_path
            return RolloutError(
                f"engine {index} died: its process ended unexpectedly ({_reason(error)}); log: {path}; its last "
                f"lines:\n{self._on_node(index, log_tail, path)}"
            )
        return RolloutError(f"Ray failed while talking to rollout engines: {_last_line(error)}")

    def _index(self, error: ray.exceptions.ActorDiedError) -> int:
        ids = [actor._actor_id.hex() for actor in self._actors]
        return ids.index(error.actor_id) if error.actor_id in ids else 0

    def _on_node(self, index: int, function: Callable[[str], Any], argument: str) -> Any:
        """Runs a function on the machine of engine `index`, whose process may be gone."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if not self._workers:
            return function(argument)
        strategy = NodeAffinitySchedulingStrategy(self._workers[index].node_id, soft=False)
        task = ray.remote(num_cpus=0)(function).options(scheduling_strategy=strategy)
        try:
            return ray.get(task.remote(argument), timeout=_STOP_SECONDS)
        except ray.exceptions.RayError as error:
            return f"(no answer from node {self._workers[index].node_id}: {type(error).__name__})"

    def _sweep(self) -> None:
        for index, setup in enumerate(self._setups):
            self._on_node(index, remove_files, setup.instance)


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
    shape = route_shape(load_model_shape(model_path))
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


def _reason(error: ray.exceptions.ActorDiedError) -> str:
    """The line of Ray's long message that says why."""
    for line in str(error).splitlines():
        if "exit" in line.lower() or "killed" in line.lower():
            return line.strip().rstrip(".")
    return _last_line(error)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
