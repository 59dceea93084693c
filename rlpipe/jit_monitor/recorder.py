"""Collects events from any thread, with nested time counted once."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlpipe.jit_monitor.events import JitEvent


@dataclass(slots=True)
class OpenSpan:
    """An event that has begun. `inner_seconds` belongs to events inside it."""

    kind: str
    name: str
    key: str
    siblings: "list[OpenSpan]"
    started: float
    inner_seconds: float = 0.0


class Recorder:
    """Thread-safe. `phase` and `step` are plain attributes of the process and not of a thread or context: autograd
    runs the backward pass on threads of its own, and what they compile belongs to the step's current phase. Events go
    to `on_event` where it is set, else they wait for `drain`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.phase = ""
        self.step = 0
        self.on_event: Callable[[JitEvent], None] | None = None
        self._events: list[JitEvent] = []
        self._clock = clock
        self._lock = threading.Lock()
        self._local = threading.local()

    def open(self, kind: str, name: str, key: str = "") -> OpenSpan:
        stack = self._stack()
        span = OpenSpan(kind, name, key, stack, self._clock())
        stack.append(span)
        return span

    def close(self, span: OpenSpan, *, compiled: bool) -> None:
        """End `span` and keep it as an event; any thread may end it."""
        elapsed = self._leave(span)
        own_seconds = max(0.0, elapsed - span.inner_seconds)
        self._keep(span.kind, span.name, span.key, own_seconds, compiled, span.siblings)

    @contextmanager
    def span(self, kind: str, name: str, key: str = "", *, compiled: bool = True) -> Iterator[None]:
        span = self.open(kind, name, key)
        try:
            yield
        finally:
            self.close(span, compiled=compiled)

    def record(self, kind: str, name: str, key: str, seconds: float, *, compiled: bool) -> None:
        """An event that is over, reported by its compiler with its duration."""
        stack = self._stack()
        if stack:
            stack[-1].inner_seconds += seconds
        self._keep(kind, name, key, seconds, compiled, stack)

    def drain(self) -> tuple[JitEvent, ...]:
        """The events since the last call, oldest first."""
        with self._lock:
            events, self._events = self._events, []
        return tuple(events)

    def _stack(self) -> list[OpenSpan]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[OpenSpan] = self._local.stack
        return stack

    def _leave(self, span: OpenSpan) -> float:
        """Take the span off its stack and charge its time to the span around it; returns the seconds it was open."""
        elapsed = self._clock() - span.started
        position = span.siblings.index(span)
        del span.siblings[position]
        if position:
            span.siblings[position - 1].inner_seconds += elapsed
        return elapsed

    def _keep(self, kind: str, name: str, key: str, seconds: float, compiled: bool, around: list[OpenSpan]) -> None:
        within = around[-1].kind if around else ""
        event = JitEvent(kind, name, key, seconds, compiled, within, self.phase, self.step)
        if self.on_event is not None:
            self.on_event(event)
            return
        with self._lock:
            self._events.append(event)
