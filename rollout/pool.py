"""The driver's handle on all rollout engines."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import ray

from rlpipe.config.root import Config
from rlpipe.shared.errors import DeadlineError, EngineFailure, RlpipeError, RolloutError
from rlpipe.shared.interrupts import raise_if_requested
from rlpipe.shared.remote import deadline_error, on_node
from rlpipe.shared.weights import EngineAdapter
from rollout.arguments import EngineSetup
from rollout.cleanup import end_engine, remove_files
from rollout.client import EngineClient
from rollout.engine_calls import EngineCalls, FleetCalls
from rollout.engine_launch import engine_setups, launch_engine
from rollout.failures import log_tail
from rollout.fleet import EngineState, Fleet, RunningEngine
from rollout.healing import Fault
from rollout.requests import DeviceMemory, EngineHealth, EngineRecord, EngineUsage
from rollout.supervisor import Supervisor
from rollout.weights.engine_groups import EngineWeightGroups

_STOP_SECONDS = 30.0
_LOOK_EVERY_SECONDS = 0.5
_QUEUE_SHARE = 1.25  # requests sent to an engine, over those that it runs at a time


class RolloutPool:
    """Engines as Ray actors named `rollout-engine-<pool>e<index>`.

    An engine that is lost, be it while it starts, is replaced by another, as far as `fault.engine_restarts` allows;
    calls leave it out meanwhile. The failure that no restart is left for is raised by all calls, as an RlpipeError of
    one sentence (plus the last lines of the log); afterwards only `stop` is useful. Every call has a deadline.

    weights: the groups in which engines receive updates.
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
        self._ready: tuple[EngineHealth, ...] = ()
        self._stopped = False
        self._fleet = Fleet([self.launch(setup) for setup in setups], config.fault, self._last_words)
        self._calls = FleetCalls(self._fleet)
        size, seconds = config.rollout.engine.tensor_parallel, config.deadlines.weight_sync_seconds
        self.weights = EngineWeightGroups(self._fleet, self._calls, size, seconds)
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
        adapter: EngineAdapter | None = None,
        with_text: bool = False,
    ) -> Self:
        """Starts the engines of `config` in the background; `wait_until_ready` waits for them.

        `placement` has `.strategy(index)`, a Ray scheduling strategy, `.devices_of(index)` and `.gpus_per_bundle`;
        without it Ray places the engines anywhere, on a CPU. Each engine prints into
        `log_directory/rollout_engine_<index>.log`. `say` gets lines for the user, and `on_fault` every healed engine,
        in another thread. adapter: for which engines keep room, so that updates can bring it apart from the weights.
        with_text: engines decode their responses; without it who asks for them does.
        """
        setups = engine_setups(config, model_path, placement, log_directory, adapter, with_text)
        return cls(config, setups, placement, say, on_fault)

    def launch(self, setup: EngineSetup) -> RunningEngine:
        """Starts one engine in the background."""
        return launch_engine(setup, self._placement)

    def wait_until_ready(self) -> tuple[EngineHealth, ...]:
        """Blocks until every engine can answer. Raises what an engine finds wrong, for instance ResourceError.

        Called again, it tells how the engines were when they had started.
        """
        self._ready = self._ready or tuple(self._fleet.wait_until_up())
        return self._ready

    def room_beside_bytes(self) -> float:
        """Device memory of each GPU that others may take while engines start, without an effect on the engines; 0 where
        one was lost before it could say."""
        references = [engine.room_reference for engine in self._fleet.all()]
        pending = references
        while pending:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=_LOOK_EVERY_SECONDS)
            raise_if_requested()
            self._fleet.check()  # also the end of a start that is late
        try:
            return min(ray.get(references, timeout=_LOOK_EVERY_SECONDS))
        except ray.exceptions.RayError:
            return 0

    def client(self) -> EngineClient:
        """A way to ask the engines from an event loop. Close it when it is done."""
        rollout = self._config.rollout
        same_bits = rollout.mode == "sync" and rollout.engine.deterministic
        keep_tokens = not same_bits and not self._config.algorithm.routing_replay
        return EngineClient(
            self._fleet,
            self._requests_per_engine(),
            keep_tokens,
            follow_prefixes=rollout.request_routing == "prefix",
            longest_first=rollout.request_order == "longest_first",
            migrates=rollout.migration,
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

    def note_sent_weights(self) -> None:
        """Weights of the model's folder are too old from now on, also where no engine is there to receive others."""
        self._fleet.note_sent_weights()

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

    def sleep(self, parts: Sequence[DeviceMemory]) -> float:
        """Engines give the device memory of `parts` back, after running requests have ended; its content is lost.

        Until `wake`, calls that need it raise RolloutError. Returns the seconds in which the slowest one became idle.
        """
        seconds = self._config.deadlines.rollout_seconds
        return max(self._calls.to_all("sleep", tuple(parts), seconds=seconds, phase="putting to sleep"), default=0.0)

    def wake(self, parts: Sequence[DeviceMemory]) -> None:
        """Engines take device memory for `parts` again; weights have to be sent after it."""
        self._calls.to_all("wake", tuple(parts), seconds=self._config.deadlines.weight_sync_seconds, phase="waking")

    def collect(
        self, calls: EngineCalls, deadline_seconds: float, phase: str, in_vain: Callable[[], bool] = lambda: False
    ) -> dict[RunningEngine, Any]:
        """Results of the engines that have one; see `FleetCalls.collect`."""
        return self._calls.collect(calls, deadline_seconds, phase, in_vain)

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

    def _ask(self, method: str, *arguments: Any, seconds: float, phase: str) -> list[Any]:
        """Answers of all engines that are up. Raises the failure that no restart is left for."""
        answers = self._calls.to_all(method, *arguments, seconds=seconds, phase=phase)
        self._fleet.check()
        return answers

    def _requests_per_engine(self) -> int:
        return int(self._config.rollout.engine.max_running_requests * _QUEUE_SHARE) + 1

    def _last_words(self, engine: RunningEngine, failure: EngineFailure, why: str) -> RlpipeError:
        """The failure as the end of the run, with what the engine printed last."""
        first, _, lines = str(failure).partition("\n")
        if not lines:
            first += "; its last lines:"
            lines = self._on_node(engine, log_tail, engine.setup.log_path)
        return RolloutError(f"{why}: {first}\n{lines}" if why else f"{first}\n{lines}")

    def _on_node(self, engine: RunningEngine, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function on the machine of an engine whose process may be gone."""
        if engine.address is None:
            return function(*arguments)
        try:
            return on_node(engine.address.node_id, function, *arguments, timeout_seconds=_STOP_SECONDS)
        except ray.exceptions.RayError as error:
            return f"(no answer from node {engine.address.node_id}: {type(error).__name__})"
