"""How long this process spends in each part of its work, with exchanges between processes told apart.

Seconds are the device's where there is one: parts are marked in its stream and read after a synchronisation, so
measuring never makes the host wait. Waiting inside an exchange means waiting for a peer or for the network, so of
several ranks the one that waits least is the slow one.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from actor.device import Mark, mark, seconds_between, synchronize
from rlpipe.shared.phases import Span

_EXCHANGE = "exchange"


# part, start, end, the part that it lay in (if any), the outermost one
_Ended: TypeAlias = tuple[str, Mark, Mark, str, str]


class RankClock:
    """Parts nest, and each has only the seconds that no part inside it has. One thread works at a time: the main one,
    or during the backward pass autograd's. `on_part` hears the innermost part whenever it changes."""

    def __init__(self, on_part: Callable[[str], None] | None = None) -> None:
        self.keep_spans = False
        self._on_part = on_part
        self._stack: list[tuple[str, Mark]] = []
        self.exchange = _Exchange(self, self._stack)
        self._ended: list[_Ended] = []
        self._seconds: dict[str, float] = {}
        self._spans: list[Span] = []
        self._origin = (time.time(), mark())

    @property
    def current(self) -> str:
        """The innermost open part, or nothing."""
        return self._stack[-1][0] if self._stack else ""

    def begin(self, part: str) -> None:
        self._stack.append((part, mark()))
        if self._on_part is not None:
            self._on_part(part)

    def end(self) -> None:
        """End the innermost part."""
        self.pop()
        if self._on_part is not None:
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

    def pop(self) -> None:
        """`end` without a word to `on_part`, for exchanges: there are thousands of them in a step."""
        stack = self._stack
        part, start = stack.pop()
        around, outermost = (stack[-1][0], stack[0][0]) if stack else ("", part)
        self._ended.append((part, start, mark(), around, outermost))

    def settle(self) -> None:
        """Turn marks into seconds; call often enough that they do not pile up, and where waiting for the device, which
        has to pass the last mark first, costs nothing."""
        synchronize()
        ended, self._ended = self._ended, []
        totals = self._seconds
        for part, start, end, around, outermost in ended:
            seconds = seconds_between(start, end)
            key = f"{outermost}_{_EXCHANGE}" if part == _EXCHANGE else part
            totals[key] = totals.get(key, 0.0) + seconds
            if around:
                key = f"{outermost}_{_EXCHANGE}" if around == _EXCHANGE else around
                totals[key] = totals.get(key, 0.0) - seconds
            if self.keep_spans:
                begin = self._origin[0] + seconds_between(self._origin[1], start)
                self._spans.append(Span(part, begin, seconds))

    def take(self) -> tuple[dict[str, float], tuple[Span, ...]]:
        """Seconds of each part since the last call, and its stretches if they are kept. Exchanges within part P are
        `P_exchange`, where P is the outermost part."""
        self.settle()
        seconds, self._seconds = self._seconds, {}
        spans, self._spans = tuple(self._spans), []
        self._origin = (time.time(), mark())
        return seconds, spans


class _Exchange:
    """`with clock.exchange:` around whatever may wait for other processes. Counts where a part is open, else it belongs
    to nobody. One object for all of them: making a context manager each time would cost more than the marks."""

    __slots__ = ("_clock", "_stack")

    def __init__(self, clock: RankClock, stack: list[tuple[str, Mark]]) -> None:
        self._clock, self._stack = clock, stack

    def __enter__(self) -> None:
        if self._stack:
            self._stack.append((_EXCHANGE, mark()))

    def __exit__(self, *_: object) -> None:
        if self._stack:
            self._clock.pop()


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
