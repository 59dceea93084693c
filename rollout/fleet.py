"""Which engines there are now, as the driver's thread, its event loop and the supervisor see them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rlpipe.config.fault import FaultConfig
from rlpipe.shared.errors import EngineFailure, RlpipeError
from rlpipe.shared.interrupts import raise_if_requested
from rlpipe.shared.remote import WorkerAddress
from rollout.arguments import EngineSetup
from rollout.healing import FaultCounts
from rollout.partial_response import PartialResponse
from rollout.requests import EngineHealth

_HOUR_SECONDS = 3600.0
_MOST_FRUITLESS = 4
"""Engines that are lost before they answer anything that they were asked, while no other answers."""
_LOOK_EVERY_SECONDS = 0.5


class EngineState(Enum):
    """Of an engine; a lost one is ended, and then replaced by another of the same index."""

    STARTING = "starting"
    AWAITING_WEIGHTS = "awaiting weights"
    SERVING = "serving"
    LOST = "lost"


@dataclass(eq=False)
class RunningEngine:
    """One engine from its start to its end.

    progress: of its running requests, what it has told so far. lost_at: moment of `time.monotonic`. ended: nothing of
    it is left. health: as it was when it had started. asked, answered: whether it was sent a request, and has told any
    token of one.
    """

    setup: EngineSetup
    actor: Any
    state: EngineState = EngineState.STARTING
    address: WorkerAddress | None = None
    health: EngineHealth | None = None
    progress: dict[str, PartialResponse] = field(default_factory=dict)
    failure: EngineFailure | None = None
    lost_at: float = 0.0
    ended: bool = False
    asked: bool = False
    answered: bool = False

    def __post_init__(self) -> None:
        # Asked for first: an engine that hangs while it starts cannot answer, and its stack is wanted then.
        self.address_reference = self.actor.address.remote()
        self.room_reference = self.actor.room_beside_bytes.remote()
        # Ray begins what has an answer as its argument only once that is there: later none comes before the engine has
        # started.
        self.start_reference = self.actor.start.remote(self.room_reference)

    @property
    def index(self) -> int:
        return self.setup.index

    @property
    def is_lost(self) -> bool:
        return self.state is EngineState.LOST


class Fleet:
    """The engines by index. Listeners are called, in any thread, after an engine was lost or has come back.

    last_words: of a failure that is the run's end, and why it is that.
    """

    def __init__(
        self,
        engines: Sequence[RunningEngine],
        fault: FaultConfig,
        last_words: Callable[[RunningEngine, EngineFailure, str], RlpipeError],
    ) -> None:
        self.counts = FaultCounts()
        self.end: RlpipeError | None = None
        self._engines = list(engines)
        self._fault = fault
        self._last_words = last_words
        self._restarts: deque[float] = deque()
        self._fruitless = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._requests_paused = False
        self._holds_sent_weights = False
        self._listeners: list[Callable[[], None]] = []

    def all(self) -> list[RunningEngine]:
        """One for each index, whatever its state."""
        with self._lock:
            return list(self._engines)

    def serving(self) -> list[RunningEngine]:
        """Those that answer requests."""
        return self._in_state(EngineState.SERVING)

    @contextmanager
    def taking_requests(self) -> Iterator[list[RunningEngine]]:
        """Engines that requests can be sent to within the block; none while requests are paused."""
        with self._lock:
            yield [] if self._requests_paused else self.serving()

    def pause_requests(self, paused: bool) -> None:
        """Whether requests wait. When this returns, none is being sent."""
        with self._lock:
            self._requests_paused = paused
        self._tell()

    def awaiting_weights(self) -> list[RunningEngine]:
        """Those that were restarted and hold the weights of the model's folder."""
        return self._in_state(EngineState.AWAITING_WEIGHTS)

    def up(self) -> list[RunningEngine]:
        """Those that have started and are not lost."""
        return self._in_state(EngineState.SERVING, EngineState.AWAITING_WEIGHTS)

    def check(self) -> None:
        """Raises the failure that no restart was left for."""
        if self.end is not None:
            raise self.end

    def report(self, engine: RunningEngine, failure: EngineFailure) -> None:
        """The engine is lost. Does nothing if that is known already."""
        with self._lock:
            if engine.state is EngineState.LOST:
                return
            now = time.monotonic()
            engine.state, engine.failure, engine.lost_at = EngineState.LOST, failure, now
            while self._restarts and now - self._restarts[0] > _HOUR_SECONDS:
                self._restarts.popleft()
            self._restarts.append(now)
            self._fruitless += engine.asked and not engine.answered
            if self.end is None and (why := self._why_it_ends()) is not None:
                self.end = self._last_words(engine, failure, why)
        self._tell()

    def _why_it_ends(self) -> str | None:
        """None while lost engines are replaced."""
        allowed = self._fault.engine_restarts
        if len(self._restarts) > allowed:
            return f"no restart is left, fault.engine_restarts allows {allowed} within an hour" if allowed else ""
        if self._fruitless >= _MOST_FRUITLESS:
            return f"{self._fruitless} engines in a row were lost before any answered anything, as others would be"
        return None

    def note_answer(self, engine: RunningEngine) -> None:
        """It told tokens of a request. Called with each answer, so it takes no lock."""
        engine.answered, self._fruitless = True, 0

    def give_up(self, failure: RlpipeError) -> None:
        """No engine is restarted any more."""
        self.end = self.end or failure
        self._tell()

    def replace(self, lost: RunningEngine, engine: RunningEngine) -> None:
        """`engine` takes the place of `lost`."""
        with self._lock:
            self._engines[lost.index] = engine

    @property
    def holds_sent_weights(self) -> bool:
        """Whether engines sample with weights that were sent, and not those of the model's folder."""
        return self._holds_sent_weights

    def note_sent_weights(self) -> None:
        """Weights of the model's folder are too old from now on, also where no engine is there to receive others."""
        with self._lock:
            self._holds_sent_weights = True

    def has_started(self, engine: RunningEngine, health: EngineHealth | None) -> None:
        """It is up, and serves, or awaits weights if any were sent by now. Does nothing for a lost one."""
        with self._lock:
            if engine.state is EngineState.LOST:
                return
            waits = self._holds_sent_weights or engine.setup.awaits_weights
            engine.state, engine.health = EngineState.AWAITING_WEIGHTS if waits else EngineState.SERVING, health
        self._tell()

    def serve(self, engines: Sequence[RunningEngine]) -> list[RunningEngine]:
        """They hold the weights that they are to sample with; returns those that had to wait for them."""
        with self._lock:
            new = [one for one in engines if one.state is EngineState.AWAITING_WEIGHTS]
            for one in new:
                one.state = EngineState.SERVING
        if new:
            self._tell()
        return new

    def wait_until_up(self) -> list[EngineHealth]:
        """How the engines were when they had started, once all are up at the same time. Raises as `check` does."""
        with self._changed:
            while len(up := [engine.health for engine in self.up() if engine.health]) < len(self._engines):
                self.check()
                self._changed.wait(_LOOK_EVERY_SECONDS)
                raise_if_requested()
        return up

    def wait_for_starts(self, seconds: float) -> None:
        """Returns once no engine is starting, or nobody follows one that does."""
        with self._changed:
            self._changed.wait_for(lambda: self.end is not None or not self._in_state(EngineState.STARTING), seconds)

    def listen(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.append(listener)

    def ignore(self, listener: Callable[[], None]) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    @property
    def restarts_in_the_last_hour(self) -> int:
        return len(self._restarts)

    def _in_state(self, *states: EngineState) -> list[RunningEngine]:
        with self._lock:
            return [engine for engine in self._engines if engine.state in states]

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
