"""Notices engines that are lost, ends what is left of them, and starts others in their places."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import ray

from rlpipe.config.fault import FaultConfig
from rlpipe.model.hub import model_folder
from rlpipe.model.weight_checks import check_finite
from rlpipe.shared.errors import DiskFullError, EngineFailure, ModelError, RlpipeError, RolloutError
from rlpipe.shared.remote import address_in_table, deadline_error, on_node
from rollout.arguments import EngineSetup, replacement
from rollout.cleanup import end_engine, has_stopped_process
from rollout.engine_calls import translate
from rollout.fleet import EngineState, Fleet, RunningEngine
from rollout.healing import Fault, Pulse
from rollout.partial_response import PartialResponse
from rollout.requests import EngineHealth

_LOOK_SECONDS = 0.1


class Starter(Protocol):
    """What the supervisor needs of the pool."""

    def launch(self, setup: EngineSetup) -> RunningEngine: ...


class _Probes:
    """The latest probes of one engine."""

    def __init__(self, fault: FaultConfig) -> None:
        self.pending: deque[tuple[Any, float]] = deque()
        self.missed: deque[bool] = deque(maxlen=fault.engine_probes)
        self.looked_at = 0.0
        self.answered_at = time.monotonic()


class Supervisor:
    """A thread of its own, so that an engine is noticed, ended and restarted while the driver waits for something else.

    on_fault: told of every engine that serves again. say: gets lines for the user.
    """

    def __init__(
        self,
        fleet: Fleet,
        starter: Starter,
        fault: FaultConfig,
        start_seconds: float,
        say: Callable[[str], None],
        on_fault: Callable[[Fault], None],
    ) -> None:
        self._fleet = fleet
        self._starter = starter
        self._fault = fault
        self._start_seconds = start_seconds
        self._say = say
        self._on_fault = on_fault
        self._probes: dict[RunningEngine, _Probes] = {}
        self._starts: dict[RunningEngine, tuple[float, float]] = {}  # when it began, and was looked at last
        self._started: set[int] = set()  # engines that have started at least once
        self._faults: dict[RunningEngine, Fault] = {}
        self._has_checked_model = False
        self._may_start = True
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)

    def start(self) -> None:
        """Follow the engines from now on, their first start included."""
        self._thread.start()

    def stop(self) -> None:
        """Starts nothing any more once this returns."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def pause_restarts(self) -> None:
        """Nothing is started from now on; returns once no engine is starting."""
        with self._lock:
            self._may_start = False
        self._fleet.wait_for_starts(self._start_seconds)

    def resume_restarts(self) -> None:
        with self._lock:
            self._may_start = True

    def _run(self) -> None:
        try:
            while not self._stopping.wait(_LOOK_SECONDS) and self._fleet.end is None:
                for engine in self._fleet.all():
                    self._look_at(engine)
        except BaseException as error:  # the driver must not wait for engines that nobody restarts
            if not self._stopping.is_set():
                self._fleet.give_up(RolloutError(f"supervising the engines failed: {type(error).__name__}: {error}"))
                raise

    def _look_at(self, engine: RunningEngine) -> None:
        match engine.state:
            case EngineState.LOST:
                self._replace(engine)
            case EngineState.STARTING:
                self._follow_start(engine)
            case EngineState.SERVING:
                self._note_healed(engine)
                self._probe(engine)
            case EngineState.AWAITING_WEIGHTS:
                self._probe(engine)

    def _replace(self, engine: RunningEngine) -> None:
        if not engine.ended:
            self._tell_loss(engine)
            self._end(engine)
            engine.ended = True
            self._check_model(engine)
        with self._lock:
            if not self._may_start or self._stopping.is_set() or self._fleet.end is not None:
                return
            new = self._starter.launch(replacement(engine.setup, self._fleet.holds_sent_weights))
            self._starts[new] = (time.monotonic(), 0.0)
            self._faults[new] = self._faults.pop(engine)
            self._fleet.replace(engine, new)
        self._fleet.counts.add(engine_restarts=1)

    def _check_model(self, engine: RunningEngine) -> None:
        """With a model folder that holds a NaN, every engine fails that samples with it. Looked at once, before sent
        weights have taken its place."""
        if self._has_checked_model or self._fleet.holds_sent_weights:
            return
        self._has_checked_model = True
        try:
            check_finite(model_folder(engine.setup.model_path))
        except ModelError as error:
            self._fleet.give_up(error)

    def _tell_loss(self, engine: RunningEngine) -> None:
        reason = str(engine.failure).splitlines()[0].removesuffix("; its last lines:")
        seconds_ago = time.monotonic() - engine.lost_at
        # One that is lost before it serves has the notice of the loss that it was to heal.
        self._faults.setdefault(engine, Fault(engine.index, reason, time.time() - seconds_ago, 0.0, 0.0))
        left = self._fault.engine_restarts - self._fleet.restarts_in_the_last_hour
        self._say(f"warning: {reason}; starting it again, {left} more restarts are allowed within the hour")

    def _end(self, engine: RunningEngine) -> None:
        self._probes.pop(engine, None)
        self._starts.pop(engine, None)
        if engine.address is not None:
            try:
                on_node(engine.address.node_id, end_engine, engine.address.pid, engine.setup.instance)
            except ray.exceptions.RayError as error:
                self._say(
                    f"warning: {engine.address.node_id} does not answer, what engine {engine.index} left there "
                    f"may still run ({type(error).__name__})"
                )
        ray.kill(engine.actor)

    def _follow_start(self, engine: RunningEngine) -> None:
        began, looked = self._starts.setdefault(engine, (time.monotonic(), 0.0))
        try:
            if _is_ready(engine.address_reference):
                engine.address = ray.get(engine.address_reference)
            if _is_ready(engine.start_reference):
                self._has_started(engine, ray.get(engine.start_reference))
                return
        except ray.exceptions.RayError as error:
            self._start_failed(engine, translate(engine, error))
            return
        now = time.monotonic()
        if now - began > self._start_seconds:
            self._start_failed(engine, _late_start(engine, self._start_seconds))
        elif now - looked > self._fault.engine_probe_seconds:
            self._starts[engine] = (began, now)
            # One that was stopped before it could say where it runs.
            engine.address = engine.address or address_in_table(engine.actor, f"engine {engine.index}")
            if self._is_stopped(engine):
                self._fleet.report(engine, EngineFailure(f"engine {engine.index} was stopped while it started"))

    def _start_failed(self, engine: RunningEngine, failure: RlpipeError) -> None:
        """A process may end by chance; what an engine says that has never started would be said again, and so would
        what a full disk makes any engine say."""
        is_first = engine.index not in self._started and not isinstance(failure, EngineFailure)
        if is_first or isinstance(failure, DiskFullError):
            self._fleet.give_up(failure)
            return
        again = " again" if engine.setup.restart else ""
        self._fleet.report(engine, EngineFailure(f"engine {engine.index} did not start{again}: {failure}"))

    def _has_started(self, engine: RunningEngine, health: EngineHealth) -> None:
        self._starts.pop(engine, None)
        self._started.add(engine.index)
        fault = self._faults.get(engine)
        if fault is not None:
            self._faults[engine] = replace(fault, started=time.time())
        self._fleet.has_started(engine, health)

    def _note_healed(self, engine: RunningEngine) -> None:
        fault = self._faults.pop(engine, None)
        if fault is None:
            return
        fault = replace(fault, serving=time.time())
        self._fleet.counts.add(healing_seconds=fault.healing_seconds)
        self._on_fault(fault)
        self._say(f"engine {engine.index} serves again, {fault.healing_seconds:.1f} seconds after its loss was noticed")

    def _probe(self, engine: RunningEngine) -> None:
        """Take the answers that have come; where a probe is due, judge the latest ones and send another."""
        probes = self._probes.setdefault(engine, _Probes(self._fault))
        now = time.monotonic()
        while probes.pending and _is_ready(probes.pending[0][0]):
            reference, sent_at = probes.pending.popleft()
            self._take_pulse(engine, probes, reference, now - sent_at)
        if engine.state is EngineState.LOST or now - probes.looked_at < self._fault.engine_probe_seconds:
            return
        probes.looked_at = now
        late = sum(now - sent_at > self._fault.engine_probe_deadline_seconds for _, sent_at in probes.pending)
        if late + sum(probes.missed) >= self._fault.engine_missed_probes:
            self._judge(engine, now - probes.answered_at)
        probes.pending.append((engine.actor.probe.remote(), now))

    def _take_pulse(self, engine: RunningEngine, probes: _Probes, reference: Any, seconds: float) -> None:
        try:
            pulse: Pulse = ray.get(reference)
        except ray.exceptions.RayError as error:
            failure = translate(engine, error)
            self._fleet.report(engine, EngineFailure(str(failure)))
            return
        probes.missed.append(seconds > self._fault.engine_probe_deadline_seconds)
        probes.answered_at = time.monotonic()
        if pulse.grown:
            self._fleet.note_answer(engine)
        known = engine.progress
        for new in pulse.grown:
            known[new.request_id] = new.after(known.get(new.request_id, PartialResponse()))
        engine.progress = {name: known[name] for name in pulse.running if name in known}
        if pulse.silent_seconds > self._fault.engine_hang_seconds:
            reason = f"engine {engine.index} hangs: SGLang's processes run and have answered nothing for "
            self._fleet.report(
                engine, EngineFailure(f"{reason}{pulse.silent_seconds:.0f} seconds; log: {engine.setup.log_path}")
            )

    def _judge(self, engine: RunningEngine, silent_seconds: float) -> None:
        """It missed too many probes."""
        missed = f"engine {engine.index} hangs: it has not answered a health probe for {silent_seconds:.1f} seconds"
        if self._is_stopped(engine):
            self._fleet.report(engine, EngineFailure(f"{missed} and a process of it is stopped"))
        elif silent_seconds > self._fault.engine_hang_seconds:
            self._fleet.report(engine, EngineFailure(f"{missed}; log: {engine.setup.log_path}"))

    def _is_stopped(self, engine: RunningEngine) -> bool:
        if engine.address is None:
            return False
        try:
            return on_node(engine.address.node_id, has_stopped_process, engine.address.pid)
        except ray.exceptions.RayError:
            return False  # its own calls will tell that the node is gone


def _late_start(engine: RunningEngine, seconds: float) -> RlpipeError:
    if engine.address is None:
        return RolloutError(
            f"Ray did not place rollout engine {engine.index} within {seconds:g} seconds; see `ray status` for free "
            "CPUs and GPUs"
        )
    return deadline_error([engine.address], seconds, f"starting rollout engine {engine.index}")


def _is_ready(reference: Any) -> bool:
    ready, _ = ray.wait([reference], timeout=0)
    return bool(ready)
