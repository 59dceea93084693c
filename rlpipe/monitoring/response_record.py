"""Lengths of an iteration's responses and how fast engines wrote them: what the tail cost, and what a replay needs."""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from rlpipe.config.rollout import RolloutConfig
from rollout.migration import Pace
from rollout.requests import ResponseSpan

Floats = NDArray[np.float64]
_TURNS = 10
_MOST_ENGINES = 16
_LEAST_SPREAD = 1e-6
_Count = Annotated[int, Field(ge=1, le=2**20)]


@dataclass(frozen=True)
class GroupLengths:
    """Tokens of the responses to one prompt, and what was expected of each; None where nothing was known."""

    tokens: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]
    expected: PositiveInt | None


@dataclass(frozen=True)
class RolloutShape:
    """What generation was told: `wanted` groups of an iteration by `engines` that run up to `running` responses each,
    and the settings of `rlpipe.config.rollout` of the same names."""

    engines: Annotated[int, Field(ge=1, le=2**12)]
    running: _Count
    wanted: _Count
    longest_first: bool
    oversampling: Annotated[float, Field(ge=1, le=2**6)]
    partial: bool
    max_staleness: _Count
    migration: bool = False

    @classmethod
    def of(cls, rollout: RolloutConfig) -> Self:
        return cls(
            engines=rollout.engines,
            running=rollout.engine.max_running_requests,
            wanted=rollout.prompts_per_iteration,
            longest_first=rollout.request_order == "longest_first",
            oversampling=rollout.oversampling,
            partial=rollout.partial,
            max_staleness=rollout.max_staleness,
            migration=rollout.migration,
        )


@dataclass(frozen=True)
class ResponseRecord:
    """Of one iteration. seconds: of generation. groups: those that finished, in the order in which their prompts
    came."""

    shape: RolloutShape
    seconds: NonNegativeFloat
    pace: Pace
    groups: Annotated[tuple[GroupLengths, ...], Field(min_length=1)]

    @property
    def responses(self) -> int:
        return sum(len(group.tokens) for group in self.groups)


_READER = TypeAdapter(ResponseRecord)


def read_record(row: Mapping[str, Any]) -> ResponseRecord | None:
    """A record from its `asdict` as JSON gives it; None for a row that is none."""
    try:
        return _READER.validate_python(row)
    except ValidationError:
        return None


def room(shape: RolloutShape, responses: int) -> int:
    """Responses that can be written at a time, of so many."""
    return shape.engines * min(shape.running, math.ceil(responses / shape.engines))


def tail_metrics(spans: Sequence[ResponseSpan], shape: RolloutShape) -> dict[str, float]:
    """What the engines' room lost while the last responses were written."""
    if not spans:
        return {}
    times, in_flight = _occupancy(*_times(spans))
    whole = room(shape, len({span.response for span in spans}))
    seconds, used = np.diff(times), np.minimum(in_flight, whole)
    all_seconds = float(seconds.sum())
    return {
        "rollout/tail_lost_share": 1.0 - float(used @ seconds) / (whole * all_seconds) if all_seconds else 0.0,
        "rollout/tail_seconds": float(seconds[used < whole / 2].sum()),
    }


def measured_pace(spans: Sequence[ResponseSpan], running: int) -> Pace:
    """The line through each response's seconds a token over the mean number of responses that its engine ran while its
    tokens were written: up to `running` of those that it was handed. Which is a mean over tokens, so it depends on the
    pace, and both are found in turns. Where the responses do not tell both numbers, seconds do not depend on how many
    there are. Some engines tell it for all.
    """
    by_engine: dict[int, list[ResponseSpan]] = {}
    for span in spans:
        by_engine.setdefault(span.engine, []).append(span)
    engines = [_EngineTimes.of(own, running) for own in list(by_engine.values())[:_MOST_ENGINES]]
    engines = [engine for engine in engines if len(engine.tokens)]
    if not engines:
        return Pace(0.0, 0.0)
    seconds, tokens = (np.concatenate([getattr(one, name) for one in engines]) for name in ("seconds", "tokens"))
    pace = Pace(1.0, 0.0)
    for _ in range(_TURNS):
        pace = _line(np.concatenate([engine.beside(pace) for engine in engines]), seconds / tokens, tokens)
    return pace


@dataclass(frozen=True)
class _EngineTimes:
    """An engine's responses, those without a token left out: when they ran, and how many ran at all `times`."""

    times: Floats
    ran: Floats
    begin: Floats
    end: Floats
    tokens: Floats

    @classmethod
    def of(cls, spans: Sequence[ResponseSpan], running: int) -> Self:
        begin, end = _times(spans)
        begin = _started(begin, end, running)
        times, in_flight = _occupancy(begin, end)
        tokens = np.array([span.tokens for span in spans], dtype=np.float64)
        told = (tokens > 0) & (end > begin)
        return cls(times, np.maximum(in_flight, 1).astype(float), begin[told], end[told], tokens[told])

    @property
    def seconds(self) -> Floats:
        return self.end - self.begin

    def beside(self, pace: Pace) -> Floats:
        """Of each response, the mean number that ran beside it and itself, over its tokens."""
        tokens = np.diff(self.times) / (pace.step_seconds + pace.response_seconds * self.ran)
        written, weighted = (self._between(one) for one in (tokens, tokens * self.ran))
        mean: Floats = weighted / written
        return mean

    def _between(self, steps: Floats) -> Floats:
        integral = np.concatenate([[0.0], np.cumsum(steps)])
        passed: Floats = np.interp(self.end, self.times, integral) - np.interp(self.begin, self.times, integral)
        return passed


def _line(beside: Floats, seconds: Floats, tokens: Floats) -> Pace:
    """Weighted least squares, with neither number below 0."""
    mean_beside, mean_seconds = np.average(beside, weights=tokens), np.average(seconds, weights=tokens)
    spread = np.average((beside - mean_beside) ** 2, weights=tokens)
    if spread < _LEAST_SPREAD:
        return Pace(float(mean_seconds), 0.0)
    drawn = np.average((beside - mean_beside) * (seconds - mean_seconds), weights=tokens) / spread
    slope = float(np.clip(drawn, 0.0, mean_seconds / mean_beside))
    return Pace(max(0.0, float(mean_seconds - slope * mean_beside)), slope)


def _times(spans: Sequence[ResponseSpan]) -> tuple[Floats, Floats]:
    return np.array([span.begin for span in spans]), np.array([span.end for span in spans])


def _started(begin: Floats, end: Floats, running: int) -> Floats:
    """When each was begun by an engine that is handed more than it runs: in their order, as others end. Which of those
    that were handed over together comes first is not known; those that ended first are taken to."""
    started, ends = begin.copy(), list[float]()
    for index in np.lexsort((end, begin)):
        if len(ends) == running:
            started[index] = max(begin[index], heapq.heappop(ends))
        heapq.heappush(ends, float(end[index]))
    return started


def _occupancy(begin: Floats, end: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Moments at which requests begin or end, in order, and how many are in flight between them."""
    moments = np.concatenate([begin, end])
    order = np.argsort(moments, kind="stable")
    return moments[order], np.cumsum(np.where(order < len(begin), 1, -1))[:-1]
