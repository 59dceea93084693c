"""How long this process spends in each part of its work, with exchanges between processes told apart.

Seconds are the device's where there is one: parts are marked in its stream and read after a synchronisation, so
measuring never makes the host wait. Waiting inside an exchange means waiting for a peer or for the network, so of
several ranks the one that waits least is the slow one.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from actor.device import Mark, mark, seconds_between
from rlpipe.phases import Span

_EXCHANGE = "exchange"


@dataclass(slots=True)
class _Open:
    part: str
    start: Mark
    end: Mark | None = None


class RankClock:
    """Parts nest, and each has only the seconds that no part inside it has. One thread works at a time: the main one,
    or during the backward pass autograd's. `on_part` hears the innermost part whenever it changes."""

    def __init__(self, on_part: Callable[[str], None] | None = None) -> None:
        self.keep_spans = False
        self._on_part = on_part
        self._stack: list[_Open] = []
        self._done: list[tuple[_Open, str, str]] = []  # with the part around it and the outermost one
        self._seconds: dict[str, float] = {}
        self._spans: list[Span] = []
        self._origin = (time.time(), mark())

    @property
    def current(self) -> str:
        """The innermost open part, or nothing."""
        return self._stack[-1].part if self._stack else ""

    def begin(self, part: str) -> None:
        self._stack.append(_Open(part, mark()))
        if self._on_part is not None and part != _EXCHANGE:
            self._on_part(part)

    def end(self) -> None:
        """End the innermost part."""
        ended = self._stack.pop()
        ended.end = mark()
        self._done.append((ended, self.current, self._stack[0].part if self._stack else ended.part))
        if self._on_part is not None and ended.part != _EXCHANGE:
            self._on_part(self.current)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        depth = len(self._stack)
        self.begin(name)
        try:
            yield
        finally:
            del self._stack[depth + 1 :]  # an error may have left Megatron's timers running
            self.end()

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around whatever may wait for other processes. Counts where a part is open, else it belongs to nobody."""
        if not self._stack:
            yield
            return
        with self.part(_EXCHANGE):
            yield

    def settle(self) -> None:
        """Turn marks into seconds; call when the device is synchronised, often enough that they do not pile up."""
        done, self._done = self._done, []
        for ended, around, outermost in done:
            assert ended.end is not None
            seconds = seconds_between(ended.start, ended.end)
            self._add(_key(ended.part, outermost), seconds)
            if around:
                self._add(_key(around, outermost), -seconds)
            if self.keep_spans:
                start = self._origin[0] + seconds_between(self._origin[1], ended.start)
                self._spans.append(Span(ended.part, start, seconds))

    def take(self) -> tuple[dict[str, float], tuple[Span, ...]]:
        """Seconds of each part since the last call, and its stretches if they are kept. Exchanges within part P are
        `P_exchange`, where P is the outermost part. The device must be synchronised."""
        self.settle()
        seconds, self._seconds = self._seconds, {}
        spans, self._spans = tuple(self._spans), []
        self._origin = (time.time(), mark())
        return seconds, spans

    def _add(self, key: str, seconds: float) -> None:
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds


def _key(part: str, outermost: str) -> str:
    return f"{outermost}_{_EXCHANGE}" if part == _EXCHANGE else part


class MegatronTimers:
    """What Megatron's schedules call where `config.timers` is set: they mark each forward and backward pass."""

    def __init__(self, clock: RankClock) -> None:
        self._forward = _Timer(clock, "forward")
        self._backward = _Timer(clock, "backward")
        self._other = _Timer(clock, None)

    def __call__(self, name: str, log_level: int | None = None) -> "_Timer":
        return {"forward-compute": self._forward, "backward-compute": self._backward}.get(name, self._other)


class _Timer:
    def __init__(self, clock: RankClock, part: str | None) -> None:
        self._clock, self._part = clock, part

    def start(self, barrier: bool = False) -> None:
        """A log-probability pass has no parts of its own."""
        if self._part is not None and self._clock.current == "train":
            self._clock.begin(self._part)

    def stop(self, barrier: bool = False) -> None:
        if self._part is not None and self._clock.current == self._part:
            self._clock.end()
