"""Which running responses should go on at another engine, so that the last ones of an iteration end sooner.

A step takes the longer the more responses an engine runs, above all with experts, of which each further response
reads others. So the engine whose last response is expected to end last hands on those that have the least left. Evening
out how many each engine runs would slow down the longest of all as often as not.
"""

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import NonNegativeFloat

_GAIN = 0.05
READ_SHARE = 0.25
"""Of a written token's seconds that one which is read again may take: those of a prompt are computed together."""


@dataclass(frozen=True)
class Pace:
    """Seconds that an engine takes for a token of each of n running responses: step_seconds + n * response_seconds."""

    step_seconds: NonNegativeFloat
    response_seconds: NonNegativeFloat

    def seconds(self, running: int) -> float:
        return self.step_seconds + self.response_seconds * running


@dataclass(frozen=True)
class Running:
    """A response at an engine. rest_tokens: it is expected to get. read_tokens: another engine would have to compute
    first. stays: it moved already."""

    name: str
    rest_tokens: int
    read_tokens: int
    stays: bool = False


@dataclass(frozen=True)
class Move:
    """Of the response `name` between two engines."""

    name: str
    source: int
    target: int


def expected_rest(expected: int | None, written: int) -> int | None:
    """Tokens that a response is still expected to get after `written` ones.

    Lengths have long tails: what has outgrown its expectation is expected to become twice as long as it is.
    """
    return None if expected is None else max(expected - written, written, 1)


def worthwhile_moves(engines: Mapping[int, Sequence[Running]], pace: Pace) -> list[Move]:
    """What to move now that nothing waits for an engine. `engines`: those that serve, idle ones too.

    A step of the engine that ends last must become a twentieth shorter by evening out with the least busy one, and what
    the response itself gains be worth more than reading it again.
    """
    loads = [_Load(index, responses) for index, responses in engines.items()]
    moves: list[Move] = []
    while len(loads) > 1:
        last = max(loads, key=lambda load: load.longest_tokens * pace.seconds(load.count))
        idlest = min(loads, key=lambda load: load.count)
        if not last.movable or not _pays(last, idlest, pace):
            break
        moves.append(Move(last.hand_on(idlest).name, last.index, idlest.index))
    return moves


class _Load:
    """Of an engine. movable: what has not moved yet, the one with the least left last."""

    def __init__(self, index: int, responses: Sequence[Running]) -> None:
        self.index = index
        self.movable = sorted((one for one in responses if not one.stays), key=lambda one: -one.rest_tokens)
        self._rests = sorted(one.rest_tokens for one in responses)

    @property
    def count(self) -> int:
        return len(self._rests)

    @property
    def longest_tokens(self) -> int:
        return self._rests[-1] if self._rests else 0

    def hand_on(self, target: "_Load") -> Running:
        """What has the least left."""
        one = self.movable.pop()
        self._rests.remove(one.rest_tokens)
        insort(target._rests, one.rest_tokens)
        return one


def _pays(last: _Load, idlest: _Load, pace: Pace) -> bool:
    if last.count - idlest.count < 2:
        return False
    gained = pace.seconds(last.count) - pace.seconds((last.count + idlest.count + 1) // 2)
    one = last.movable[-1]
    read_seconds = READ_SHARE * one.read_tokens * pace.response_seconds
    return gained >= _GAIN * pace.seconds(last.count) and gained * one.rest_tokens >= read_seconds
