"""The guard of one process: looks at free memory before the collectives that its policy names."""

import time
from collections.abc import Callable, Collection
from typing import Any

from actor.collectives.interception import Method, listen
from actor.collectives.operations import (
    END_OF_BATCH,
    POSITIONAL_ARGUMENTS,
    WAIT,
    first_tensor,
    message_bytes,
    size_class,
)
from actor.comm_guard.failure import Call, explain
from actor.comm_guard.places import Place, place_of
from actor.comm_guard.probe import Driver, Probe, Shortage
from actor.comm_guard.rules import Policy
from actor.comm_guard.short_way import with_short_way

NCCL = ("nccl",)


class CommGuard:
    """Between `install` and `uninstall` it holds references to the groups that it has seen.

    A call whose verdict is `skip` has a short way: once an operation's calls in a group have brought no new size class
    for a whole iteration, they are only counted.
    """

    def __init__(
        self,
        policy: Policy,
        driver: Driver,
        *,
        ttl_seconds: float,
        recovery: float,
        backends: Collection[str] = NCCL,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._policy, self._driver, self._backends, self._clock = policy, driver, backends, clock
        self._probe = Probe(driver, ttl_seconds, clock)
        self._shortage: Shortage | None = None
        self._recovery = recovery
        self._places: dict[Any, Place] = {}
        self._settled: dict[str, dict[Any, int]] = {}  # calls by operation and group, since the last `take`
        self._verdicts: dict[tuple[str, Any, str], bool] = {}  # whether to check, by operation, group and size class
        self._fresh: set[tuple[str, Any]] = set()  # operation and group with a new size class in this iteration
        self._last: dict[Any, Call] = {}
        self._checks = self._skips = self._clean_ups = 0
        self._clean_up_seconds = 0.0
        self._undo: Callable[[], None] | None = None

    def install(self) -> None:
        self._undo = listen(self)

    def uninstall(self) -> None:
        """The guard hears of nothing any more; nothing happens the second time."""
        if self._undo is not None:
            self._undo()
            self._undo = None
        for state in (self._places, self._settled, self._verdicts, self._fresh, self._last):
            state.clear()

    def take(self) -> dict[str, float]:
        """Metrics since the last call, at the end of an iteration; operations that are known by now settle."""
        watched = {group for group, place in self._places.items() if place.watched}
        skips = self._skips + sum(
            calls for groups in self._settled.values() for group, calls in groups.items() if group in watched
        )
        for groups in self._settled.values():
            groups.update(dict.fromkeys(groups, 0))
        self._settle()
        metrics = {
            "guard/checks": float(self._checks),
            "guard/skips": float(skips),
            "guard/cleanups": float(self._clean_ups),
            "guard/probe_seconds": self._probe.seconds,
            "guard/cleanup_seconds": self._clean_up_seconds,
        }
        self._checks = self._skips = self._clean_ups = 0
        self._clean_up_seconds = self._probe.seconds = 0.0
        return metrics

    def _settle(self) -> None:
        known = {(operation, group) for operation, group, _ in self._verdicts}
        for operation, group in known - self._fresh:
            place = self._places[group]
            if not place.ignored and self._policy.skips_all_sizes(operation, place.group):
                self._settled[operation].setdefault(group, 0)
        self._fresh.clear()

    def around(self, operation: str, call: Method) -> Method:
        if operation == WAIT:
            return call
        return self._guarded_batch(call) if operation == END_OF_BATCH else self._guarded(operation, call)

    def _guarded(self, operation: str, original: Method) -> Method:
        settled = self._settled.setdefault(operation, {})

        def guarded(group: Any, *args: Any, **kwargs: Any) -> Any:
            if group in settled:
                settled[group] += 1
            else:
                self._before(operation, group, (*args, *kwargs.values()))
            try:
                return original(group, *args, **kwargs)
            except RuntimeError as error:
                self._explain(error, operation, group, (*args, *kwargs.values()))
                raise

        def explain_settled(error: RuntimeError, group: Any, arguments: tuple[Any, ...]) -> None:
            self._explain(error, operation, group, arguments)

        return with_short_way(POSITIONAL_ARGUMENTS.get(operation, 0), original, settled, guarded, explain_settled)

    def _guarded_batch(self, original: Method) -> Method:
        def guarded(group: Any, *args: Any) -> Any:
            try:
                return original(group, *args)
            except RuntimeError as error:
                last = self._last.get(group)
                name = f"a batch that ends with {last.operation}" if last else "a batch"
                self._explain(error, name, group, ())
                raise

        return guarded

    def _before(self, operation: str, group: Any, arguments: tuple[Any, ...]) -> None:
        place = self._places.get(group)
        if place is None:
            place = self._places[group] = place_of(group, self._backends)
        if not place.watched:
            self._settled[operation][group] = 0
            return
        if not place.watches(first_tensor(arguments)):
            return
        call = Call(operation, place.group, place.ranks, message_bytes(arguments))
        self._last[group] = call
        size = size_class(call.size_bytes)
        key = (operation, group, size)
        check = self._verdicts.get(key)
        first_use = check is None
        if check is None:
            check = self._verdicts[key] = self._policy.verdict(operation, place.group, size) == "guard"
            self._fresh.add((operation, group))
        if check or (first_use and self._policy.guard_first_use):
            self._check(call, fresh=first_use)
        else:
            self._skips += 1

    def _check(self, call: Call, fresh: bool) -> None:
        self._checks += 1
        reading = self._probe.read(str(call), fresh)
        if self._shortage is None:
            self._shortage = Shortage(self._policy.threshold.in_bytes(reading.total_bytes), self._recovery)
        if not self._shortage.needs_clean_up(reading.free_bytes):
            return
        start = self._clock()
        self._driver.clean_up()
        self._clean_up_seconds += self._clock() - start
        self._clean_ups += 1
        self._shortage.cleaned(self._probe.read(f"{call}, after a clean-up", fresh=True).free_bytes)

    def _explain(self, error: RuntimeError, operation: str, group: Any, arguments: tuple[Any, ...]) -> None:
        place = self._places.get(group) or place_of(group, self._backends)
        if place.watches(first_tensor(arguments)):
            call = Call(operation, place.group, place.ranks, message_bytes(arguments))
            explain(error, call, self._driver, self._probe.last)
