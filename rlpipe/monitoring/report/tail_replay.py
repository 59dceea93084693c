"""Recorded lengths, generated again under other settings by engines that keep the recorded pace."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from statistics import fmean

from rlpipe.monitoring.response_record import GroupLengths, ResponseRecord, RolloutShape, room
from rollout.migration import READ_SHARE, Move, Pace, Running, expected_rest, worthwhile_moves

_LEAST_ITERATIONS = 8
_LOOK_SHARE = 31 / 32


@dataclass(frozen=True)
class Setting:
    """What is varied. known: the order is by the true lengths, which nobody has: what could be had at best."""

    longest_first: bool = True
    oversampling: float = 1.0
    partial: bool = False
    known: bool = False
    migration: bool = False

    @property
    def throws_away(self) -> bool:
        """Whether responses that take long are not trained."""
        return self.oversampling > 1 and not self.partial


@dataclass(frozen=True)
class Replayed:
    """seconds: of generation, for an iteration. lost_share: of the engines' room. dropped_share: of all tokens, those
    that nobody trains. trained_tokens: mean length of the trained responses."""

    seconds: float
    lost_share: float
    dropped_share: float
    trained_tokens: float


def replay(
    records: Sequence[ResponseRecord], setting: Setting, seconds: Callable[[int], float] | None = None
) -> Replayed:
    """Generate as many iterations as were recorded, at least some, from the recorded groups in their order; after the
    last one they begin again. All of `records`, at least one, have the shape of the last.

    seconds: that a step with so many responses takes, where that is known better than by the recorded paces.
    """
    shape = records[-1].shape
    paces = [record.pace for record in records]
    pace = Pace(fmean(one.step_seconds for one in paces), fmean(one.response_seconds for one in paces))
    engines = _Engines(shape, pace if pace.seconds(1) else Pace(1.0, 0.0), seconds)
    lengths = cycle([group for record in records for group in record.groups])
    groups = (_Group(number, group) for number, group in enumerate(lengths))
    rollouts = _Rollouts(shape, setting, engines, groups)
    for _ in range(max(len(records), _LEAST_ITERATIONS)):
        rollouts.iterate()
    return rollouts.result()


@dataclass(eq=False)
class _Group:
    """written: tokens of each response so far. age: iterations since it began."""

    number: int
    lengths: GroupLengths
    written: list[int] = field(default_factory=list)
    missing: int = 0
    age: int = 0

    def begin(self, max_staleness: int) -> int:
        """What is lost of it since it has become too old."""
        lost = sum(self.written) if self.age > max_staleness else 0
        if lost or not self.written:
            self.written, self.age = [0] * len(self.lengths.tokens), 0
        self.missing = sum(done < whole for done, whole in zip(self.written, self.lengths.tokens, strict=True))
        return lost


@dataclass(frozen=True, eq=False)
class _Response:
    group: _Group
    index: int

    @property
    def tokens(self) -> int:
        return self.group.lengths.tokens[self.index]

    @property
    def rest(self) -> int:
        return self.tokens - self.group.written[self.index]

    def key(self, setting: Setting) -> float:
        """Smaller ones go first, as in `rollout.dispatch`."""
        if setting.known:
            return -self.rest
        if not setting.longest_first:
            return 0.0
        rest = expected_rest(self.group.lengths.expected, self.group.written[self.index])
        return -math.inf if rest is None else -rest


class _Engines:
    """Each response that an engine runs gets a token in `seconds` of the responses that it runs; by default those of
    `pace`, by which responses move in any case."""

    def __init__(self, shape: RolloutShape, pace: Pace, seconds: Callable[[int], float] | None) -> None:
        self._running = shape.running
        self._pace = pace
        self._seconds = seconds or pace.seconds
        self._given = [0.0] * shape.engines
        self._ends: list[list[tuple[float, int, _Response]]] = [[] for _ in range(shape.engines)]
        self._order = count()
        self._moved: set[str] = set()
        self._next_look = math.inf

    @property
    def in_flight(self) -> int:
        return sum(map(len, self._ends))

    def take(self, response: _Response) -> bool:
        """Whether an engine had room for it."""
        engine = min(range(len(self._ends)), key=lambda one: len(self._ends[one]))
        if len(self._ends[engine]) >= self._running:
            return False
        heapq.heappush(self._ends[engine], (self._given[engine] + response.rest, next(self._order), response))
        return True

    def begin(self) -> None:
        """Another iteration."""
        self._next_look = math.inf
        self._moved.clear()

    def migrate(self) -> None:
        """As `rollout.migration` does once nothing waits: now and then, here as others have ended."""
        if self.in_flight > self._next_look:
            return
        self._next_look = _LOOK_SHARE * self.in_flight
        running = {
            engine: [self._as_running(engine, *entry) for entry in ends] for engine, ends in enumerate(self._ends)
        }
        for move in worthwhile_moves(running, self._pace):
            self._move(move)

    def _as_running(self, engine: int, end: float, order: int, response: _Response) -> Running:
        written = max(0, math.floor(response.tokens - (end - self._given[engine])))
        rest = expected_rest(response.group.lengths.expected, written) or max(written, 1)
        return Running(str(order), rest, written, stays=str(order) in self._moved)

    def _move(self, move: Move) -> None:
        """What is read again delays the response by what that takes."""
        source, target = self._ends[move.source], self._ends[move.target]
        entry = next(one for one in source if str(one[1]) == move.name)
        end, order, response = entry
        source.remove(entry)
        heapq.heapify(source)
        rest = end - self._given[move.source]
        reading = READ_SHARE * self._pace.response_seconds * max(0.0, response.tokens - rest)
        rest += reading / self._seconds(len(target) + 1)
        heapq.heappush(target, (self._given[move.target] + rest, order, response))
        self._moved.add(move.name)

    def next_end(self) -> tuple[float, _Response]:
        """Seconds until the next response is whole, and which."""
        waits = {
            engine: (ends[0][0] - self._given[engine]) * self._seconds(len(ends))
            for engine, ends in enumerate(self._ends)
            if ends
        }
        first = min(waits, key=lambda engine: waits[engine])
        for engine in waits:
            self._given[engine] += waits[first] / self._seconds(len(self._ends[engine]))
        return waits[first], heapq.heappop(self._ends[first])[-1]

    def abort(self) -> Iterator[tuple[_Response, int]]:
        """What was running, with the tokens that are not written."""
        for engine, ends in enumerate(self._ends):
            yield from ((response, math.ceil(end - self._given[engine])) for end, _, response in ends)
            ends.clear()


class _Rollouts:
    """Iterations as `rlpipe.generation.group_source` makes them in mode `sync`."""

    def __init__(self, shape: RolloutShape, setting: Setting, engines: _Engines, groups: Iterator[_Group]) -> None:
        self._shape = shape
        self._setting = setting
        self._engines = engines
        self._groups = groups
        self._carried: list[_Group] = []
        self._seconds: list[float] = []
        self._room_seconds = self._used_seconds = 0.0
        self._dropped = 0
        self._trained: list[int] = []

    def iterate(self) -> None:
        target = math.ceil(self._shape.wanted * self._setting.oversampling)
        begun, self._carried = self._carried[:target], self._carried[target:]
        begun += islice(self._groups, target - len(begun))
        self._dropped += sum(group.begin(self._shape.max_staleness) for group in begun)
        responses = [_Response(group, index) for group in begun for index in range(len(group.written))]
        needed = set(begun[: self._shape.wanted])  # the others get the room that these leave
        order = sorted((one for one in responses if one.rest), key=lambda one: one.key(self._setting))
        waiting = deque(sorted(order, key=lambda one: one.group not in needed))
        whole = room(self._shape, len(waiting))
        finished = [group for group in begun if not group.missing]
        self._engines.begin()
        seconds = 0.0
        while len(finished) < self._shape.wanted:
            while waiting and self._engines.take(waiting[0]):
                waiting.popleft()
            if self._setting.migration and not waiting:
                self._engines.migrate()
            used = min(self._engines.in_flight, whole)
            passed, response = self._engines.next_end()
            seconds += passed
            self._room_seconds += whole * passed
            self._used_seconds += used * passed
            group = response.group
            group.written[response.index] = group.lengths.tokens[response.index]
            group.missing -= 1
            if not group.missing:
                finished.append(group)
        self._seconds.append(seconds)
        self._end(begun, finished)

    def _end(self, begun: Sequence[_Group], finished: Sequence[_Group]) -> None:
        for response, missing in self._engines.abort():
            response.group.written[response.index] = response.group.lengths.tokens[response.index] - missing
        trained = finished[: self._shape.wanted]
        self._trained += [tokens for group in trained for tokens in group.lengths.tokens]
        rest = [group for group in begun if group not in trained]
        if self._setting.partial:
            for group in rest:
                group.age += 1
            self._carried += rest
        else:
            self._dropped += sum(sum(group.written) for group in rest)

    def result(self) -> Replayed:
        return Replayed(
            seconds=fmean(self._seconds),
            lost_share=1.0 - self._used_seconds / self._room_seconds if self._room_seconds else 0.0,
            dropped_share=self._dropped / (self._dropped + sum(self._trained)),
            trained_tokens=fmean(self._trained),
        )
