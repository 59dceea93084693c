"""Which engine gets which request: the one with the fewest tokens in flight that has room."""

from collections import deque
from collections.abc import Collection, Sequence

from rollout.requests import GenerateRequest


class Dispatcher:
    """Hands out requests in their order, urgent ones first. A request in flight counts with the most tokens that it
    may become.

    An engine has room for `requests_per_engine` requests. That is more than it runs at a time, so that it never waits
    for the driver; what is not handed out yet goes to the engine that turns out to be faster.
    """

    def __init__(self, engines: int, requests_per_engine: int) -> None:
        self._waiting: deque[GenerateRequest] = deque()
        self._urgent: deque[GenerateRequest] = deque()
        self._tokens = [0] * engines
        self._requests = [0] * engines
        self._limit = requests_per_engine
        self._serving: Collection[int] = range(engines)

    def add(self, request: GenerateRequest) -> None:
        self._queue(request).append(request)

    def put_back(self, engine: int, requests: Sequence[GenerateRequest]) -> None:
        """Requests that were handed to `engine`, which is lost, are the next ones again."""
        for request in reversed(requests):
            self.finished(engine, request)
            self._queue(request).appendleft(request)

    def serve_by(self, engines: Collection[int]) -> None:
        """Only these get requests from now on."""
        self._serving = frozenset(engines)

    def assign(self) -> dict[int, list[GenerateRequest]]:
        """Requests to send now, by engine."""
        batches: dict[int, list[GenerateRequest]] = {}
        while waiting := self._urgent or self._waiting:
            free = [engine for engine in sorted(self._serving) if self._requests[engine] < self._limit]
            if not free:
                break
            engine = min(free, key=lambda index: self._tokens[index])
            request = waiting.popleft()
            self._requests[engine] += 1
            self._tokens[engine] += request.most_tokens
            batches.setdefault(engine, []).append(request)
        return batches

    def finished(self, engine: int, request: GenerateRequest) -> None:
        self._requests[engine] -= 1
        self._tokens[engine] -= request.most_tokens

    def take_waiting(self) -> list[GenerateRequest]:
        """Requests that were not handed out; they are forgotten."""
        waiting = [*self._urgent, *self._waiting]
        self._urgent.clear()
        self._waiting.clear()
        return waiting

    def busy_engines(self) -> list[int]:
        """Engines with requests in flight."""
        return [engine for engine, count in enumerate(self._requests) if count]

    def _queue(self, request: GenerateRequest) -> deque[GenerateRequest]:
        return self._urgent if request.urgent else self._waiting
