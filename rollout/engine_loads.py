"""What is in flight at each engine, of which a driver may hold hundreds: nothing here searches through all of them."""

import heapq
from collections.abc import Collection


class EngineLoads:
    """Requests and tokens in flight, by engine, and the least loaded one that has room for another request.

    The heap holds (tokens, engine) as they were when they changed; entries that no longer hold are dropped when they
    come up, and all at once when they are many.
    """

    def __init__(self, engines: int, most_requests: int) -> None:
        self._tokens = [0] * engines
        self._requests = [0] * engines
        self._most_requests = most_requests
        self._serving: frozenset[int] = frozenset()
        self._serving_tokens = 0
        self._heap: list[tuple[int, int]] = []
        self.serve_by(range(engines))

    def serve_by(self, engines: Collection[int]) -> None:
        """Only these are chosen from now on."""
        if self._serving == engines:
            return
        self._serving = frozenset(engines)
        self._serving_tokens = sum(self._tokens[engine] for engine in self._serving)
        self._rebuild()

    def add(self, engine: int, tokens: int) -> None:
        """One more request in flight."""
        self._change(engine, 1, tokens)

    def remove(self, engine: int, tokens: int) -> None:
        """One request less."""
        self._change(engine, -1, -tokens)

    def least(self) -> int | None:
        """The serving engine with room that has the fewest tokens in flight, of equal ones the first; None where all
        are full."""
        while self._heap:
            tokens, engine = self._heap[0]
            if tokens == self._tokens[engine] and self.has_room(engine):
                return engine
            heapq.heappop(self._heap)
        return None

    def has_room(self, engine: int) -> bool:
        """Whether it serves and may get another request."""
        return engine in self._serving and self._requests[engine] < self._most_requests

    def tokens(self, engine: int) -> int:
        return self._tokens[engine]

    def fair_tokens(self, waiting_tokens: int) -> float:
        """The load of each serving engine if all had the same, and what waits were handed out too."""
        return (self._serving_tokens + waiting_tokens) / len(self._serving)

    def busy(self) -> list[int]:
        """Engines with requests in flight."""
        return [engine for engine, count in enumerate(self._requests) if count]

    def _change(self, engine: int, requests: int, tokens: int) -> None:
        self._requests[engine] += requests
        self._tokens[engine] += tokens
        if engine not in self._serving:
            return
        self._serving_tokens += tokens
        if self.has_room(engine):
            heapq.heappush(self._heap, (self._tokens[engine], engine))
        if len(self._heap) > 8 * len(self._tokens) + 64:
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(self._tokens[engine], engine) for engine in self._serving if self.has_room(engine)]
        heapq.heapify(self._heap)
