"""What is told about lost engines: pulses of living ones, counts, and the rows of faults.jsonl."""

import threading
from dataclasses import dataclass

from rlpipe.shared.number_arrays import TokenLogprobs, Tokens
from rollout.partial_response import PartialResponse


@dataclass(frozen=True)
class NewTokens:
    """Tokens of a running response, from its token `start` on, that weights of `version` sampled."""

    request_id: str
    start: int
    token_ids: Tokens
    logprobs: TokenLogprobs
    version: int

    def after(self, before: PartialResponse) -> PartialResponse:
        """`before` with these tokens behind it, or as it is where tokens in between are not known."""
        if self.start > len(before.token_ids):
            return before
        kept = before.shortened(len(before.token_ids) - self.start)
        return kept.extended(self.token_ids, self.logprobs, self.version)


@dataclass(frozen=True)
class Pulse:
    """An engine's answer to a health probe.

    silent_seconds: since SGLang's processes said anything, while they have requests to answer; 0 without. running: ids
    of the requests; grown: their tokens that no earlier pulse told.
    """

    silent_seconds: float
    running: tuple[str, ...]
    grown: tuple[NewTokens, ...]


@dataclass(frozen=True)
class Fault:
    """A row of faults.jsonl: an engine that was lost and has come back. Moments are those of `time.time`."""

    engine: int
    reason: str
    noticed: float
    started: float
    serving: float

    @property
    def healing_seconds(self) -> float:
        return self.serving - self.noticed


class FaultCounts:
    """Adds up what faults cost, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def add(self, **values: float) -> None:
        with self._lock:
            for name, value in values.items():
                self._values[name] = self._values.get(name, 0.0) + value

    def take(self) -> dict[str, float]:
        """What was added since the last call."""
        with self._lock:
            values, self._values = self._values, {}
        return values
