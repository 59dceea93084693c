"""Which engine gets which request: the one that has its prefix in the cache, unless balance says otherwise."""

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from rollout.engine_loads import EngineLoads
from rollout.requests import GenerateRequest

_GROUP_SHARE = 1.1
_CONVERSATION_SHARE = 1.5
_SPARE_REQUESTS = 4
_REMEMBERED_HOMES = 2**17


@dataclass(frozen=True)
class RoutingCounts:
    """later_turns: requests of conversations that had an engine already; moved_turns: those that went to another, since
    theirs was lost or overloaded. moved_responses: that went on at another engine, which had to compute `read_tokens`
    of theirs again."""

    later_turns: int = 0
    moved_turns: int = 0
    moved_responses: int = 0
    read_tokens: int = 0


class Dispatcher:
    """Hands out requests, urgent ones first, then those that are expected to become longest, so that no engine begins
    them when the others are done (the rule of the longest processing time, Graham 1969); those of which nothing is
    known count as the longest. Equal ones, and without `longest_first` all, keep their order. A request in flight
    counts with the tokens that it will likely become; the load of an engine is their sum.

    A new request goes to the engine with the least load. The next turn of its conversation follows it, up to 1.5 times
    the fair share of the load and four requests more: the whole history is in that engine's cache. The other samples of
    its group follow it up to 1.1 times the fair share: they have the prompt in common. The fair share counts what still
    waits. Without `follow_prefixes` every request is new.

    An engine has room for `requests_per_engine` requests. That is more than it runs at a time, so that it never waits
    for the driver; what is not handed out yet goes to the engine that turns out to be faster.
    """

    def __init__(
        self, engines: int, requests_per_engine: int, follow_prefixes: bool = True, longest_first: bool = True
    ) -> None:
        self._waiting = _Queue(longest_first)
        self._urgent = _Queue(longest_first)
        self._waiting_tokens = 0
        self._loads = EngineLoads(engines, requests_per_engine)
        self._homes = _Homes() if follow_prefixes else None
        self._targets: dict[str, int] = {}
        self._later_turns = self._moved_turns = self._moved_responses = self._read_tokens = 0

    def add(self, request: GenerateRequest) -> None:
        self._queue(request).add(request)
        self._waiting_tokens += request.likely_tokens

    def put_back(self, engine: int, requests: Sequence[GenerateRequest]) -> None:
        """Requests that were handed to `engine`, which is lost, are the next ones again."""
        for request in reversed(requests):
            self.finished(engine, request)
            self._queue(request).put_back(request)
            self._waiting_tokens += request.likely_tokens

    def move(self, engine: int, request: GenerateRequest, target: int) -> None:
        """A request that `engine` had begun goes on at `target`, or elsewhere if that has no room any more."""
        self._targets[request.request_id] = target
        self.put_back(engine, [request])
        self._moved_responses += 1
        self._read_tokens += request.read_tokens

    def serve_by(self, engines: Mapping[int, object]) -> None:
        """Only these get requests from now on. An index with another object than before has an empty cache."""
        if self._homes is not None:
            self._homes.see(engines)
        self._loads.serve_by(engines.keys())

    def assign(self) -> dict[int, list[GenerateRequest]]:
        """Requests to send now, by engine."""
        batches: dict[int, list[GenerateRequest]] = {}
        while waiting := self._urgent or self._waiting:
            least = self._loads.least()
            if least is None:
                break
            request = waiting.pop()
            engine = self._choose(request, least)
            self._waiting_tokens -= request.likely_tokens
            self._loads.add(engine, request.likely_tokens)
            batches.setdefault(engine, []).append(request)
        return batches

    def finished(self, engine: int, request: GenerateRequest) -> None:
        self._loads.remove(engine, request.likely_tokens)

    def take_waiting(self) -> list[GenerateRequest]:
        """Requests that were not handed out; they are forgotten."""
        self._waiting_tokens = 0
        self._targets.clear()
        return [queue.pop() for queue in (self._urgent, self._waiting) for _ in range(len(queue))]

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait for an engine."""
        return bool(self._urgent or self._waiting)

    def busy_engines(self) -> list[int]:
        """Engines with requests in flight."""
        return self._loads.busy()

    def take_counts(self) -> RoutingCounts:
        """Since the last call."""
        counts = RoutingCounts(self._later_turns, self._moved_turns, self._moved_responses, self._read_tokens)
        self._later_turns = self._moved_turns = self._moved_responses = self._read_tokens = 0
        return counts

    def _choose(self, request: GenerateRequest, least: int) -> int:
        """Where it is to move, where its prefix is in the cache, or `least`, the engine with the least load."""
        target = self._targets.pop(request.request_id, None)
        if target is not None:
            engine = target if self._loads.has_room(target) else least
            if self._homes is not None:
                self._homes.note(request, engine)
            return engine
        if self._homes is None:
            return least
        home = self._homes.of_conversation(request)
        if home is None:
            home = self._homes.of_group(request)
            engine = least if home is None or not self._may_follow(home, request, _GROUP_SHARE, 0) else home
        else:
            spare = _SPARE_REQUESTS * request.likely_tokens
            follows = self._may_follow(home, request, _CONVERSATION_SHARE, spare)
            engine = home if follows else least
            self._later_turns += 1
            self._moved_turns += not follows
        self._homes.note(request, engine)
        return engine

    def _may_follow(self, home: int, request: GenerateRequest, share: float, spare_tokens: int) -> bool:
        """Whether `home` has room, and a load of at most `share` times the fair one and `spare_tokens`."""
        if not self._loads.has_room(home):
            return False
        fair_tokens = self._loads.fair_tokens(self._waiting_tokens)
        return self._loads.tokens(home) + request.likely_tokens <= share * fair_tokens + spare_tokens

    def _queue(self, request: GenerateRequest) -> "_Queue":
        return self._urgent if request.urgent else self._waiting


class _Queue:
    """Requests in the order in which they are handed out: those that came back, then the longest, then the first; spare
    ones behind all others, in the same order."""

    def __init__(self, longest_first: bool) -> None:
        self._longest_first = longest_first
        self._heap: list[tuple[int, float, int, GenerateRequest]] = []
        self._arrivals = count()
        self._returns = count(-1, -1)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: GenerateRequest) -> None:
        known = request.expected_tokens if self._longest_first else None
        length = math.inf if known is None else known
        heapq.heappush(self._heap, (int(request.spare), -length, next(self._arrivals), request))

    def put_back(self, request: GenerateRequest) -> None:
        """Before all others."""
        heapq.heappush(self._heap, (next(self._returns), 0.0, 0, request))

    def pop(self) -> GenerateRequest:
        return heapq.heappop(self._heap)[-1]


class _Homes:
    """The engine that answered last for each conversation, and for each group; the oldest ones are forgotten."""

    def __init__(self) -> None:
        self._engines: dict[int, object] = {}
        self._homes: OrderedDict[tuple[str, str], tuple[int, object]] = OrderedDict()

    def see(self, engines: Mapping[int, object]) -> None:
        self._engines |= engines

    def of_conversation(self, request: GenerateRequest) -> int | None:
        """None for its first turn, -1 for an engine that is no more."""
        return self._of("conversation", request.conversation_id)

    def of_group(self, request: GenerateRequest) -> int | None:
        return self._of("group", request.group_id)

    def note(self, request: GenerateRequest, engine: int) -> None:
        for key in (("conversation", request.conversation_id), ("group", request.group_id)):
            if key[1]:
                self._homes[key] = (engine, self._engines.get(engine))
                self._homes.move_to_end(key)
        while len(self._homes) > _REMEMBERED_HOMES:
            self._homes.popitem(last=False)

    def _of(self, kind: str, name: str) -> int | None:
        if not name or (home := self._homes.get((kind, name))) is None:
            return None
        engine, identity = home
        return engine if self._engines.get(engine) is identity else -1
