"""Watches without acting: what each kind of collective does to the device's memory, for a policy to be made from."""

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actor.collectives.interception import Method, listen
from actor.collectives.operations import END_OF_BATCH, WAIT, first_tensor, message_bytes, size_class
from actor.comm_guard.evidence import Evidence, Observation
from actor.comm_guard.failure import Call, explain
from actor.comm_guard.guard import NCCL
from actor.comm_guard.places import Place, place_of
from actor.comm_guard.probe import Driver, Probe
from actor.comm_guard.rules import Stack
from rlpipe.shared.atomic_file import write_atomically
from rlpipe.shared.disk_errors import left_out_when_full


@dataclass(frozen=True)
class _Memory:
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int


class Observer:
    """Reads memory before and after every call, which slows training down: for profiles only."""

    def __init__(
        self, driver: Driver, stack: Stack, folder: Path | None, rank: int, *, backends: Collection[str] = NCCL
    ) -> None:
        """folder: where `take` leaves what was seen so far, in a file of this rank."""
        self._driver, self._stack, self._backends = driver, stack, backends
        self._path = None if folder is None else folder / f"rank-{rank:05d}.json"
        self._probe = Probe(driver, ttl_seconds=0.0)
        self._places: dict[Any, Place] = {}
        self._seen: dict[tuple[str, str, str], Observation] = {}
        self._checks = 0
        self._undo: Callable[[], None] | None = None

    def install(self) -> None:
        self._undo = listen(self)

    def uninstall(self) -> None:
        """Hear of nothing any more, and leave the evidence, now with what a clean-up costs."""
        if self._undo is None:
            return
        self._undo()
        self._undo = None
        self._places.clear()
        start = time.perf_counter()
        self._driver.clean_up()
        self._write(time.perf_counter() - start)

    def take(self) -> dict[str, float]:
        """Metrics since the last call, at the end of an iteration, when the evidence so far is left as well."""
        self._write(clean_up_seconds=0.0)
        metrics = {
            "guard/checks": float(self._checks),
            "guard/skips": 0.0,
            "guard/cleanups": 0.0,
            "guard/probe_seconds": self._probe.seconds,
            "guard/cleanup_seconds": 0.0,
        }
        self._checks, self._probe.seconds = 0, 0.0
        return metrics

    def _write(self, clean_up_seconds: float) -> None:
        if self._path is None or not self._seen:
            return
        total_bytes = self._driver.memory()[1]
        evidence = Evidence(self._stack, total_bytes, clean_up_seconds, tuple(self._seen.values()))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with left_out_when_full():
            write_atomically(self._path, json.dumps(evidence.as_json(), indent=1).encode())

    def around(self, operation: str, call: Method) -> Method:
        return call if operation in (WAIT, END_OF_BATCH) else self._observed(operation, call)

    def _observed(self, operation: str, original: Method) -> Method:
        def observed(group: Any, *args: Any, **kwargs: Any) -> Any:
            arguments = (*args, *kwargs.values())
            place = self._places.get(group)
            if place is None:
                place = self._places[group] = place_of(group, self._backends)
            if not place.watches(first_tensor(arguments)):
                return original(group, *args, **kwargs)
            call = Call(operation, place.group, place.ranks, message_bytes(arguments))
            before = self._memory(call)
            try:
                result = original(group, *args, **kwargs)
            except RuntimeError as error:
                explain(error, call, self._driver, self._probe.last)
                raise
            self._record(call, before, self._memory(call))
            return result

        return observed

    def _memory(self, call: Call) -> _Memory:
        free = self._probe.read(str(call), fresh=True).free_bytes
        return _Memory(free, *self._driver.allocator())

    def _record(self, call: Call, before: _Memory, after: _Memory) -> None:
        self._checks += 1
        key = (call.operation, call.group, size_class(call.size_bytes))
        drop = max(0, before.free_bytes - after.free_bytes)
        pool = max(0, after.reserved_bytes - before.reserved_bytes)
        allocated = max(0, after.allocated_bytes - before.allocated_bytes)
        seen = self._seen.get(key)
        probe_seconds = self._probe.seconds / (2 * self._checks)
        if seen is None:
            self._seen[key] = Observation(*key, call.ranks, 1, drop, 0, allocated, pool, probe_seconds)
            return
        self._seen[key] = replace(
            seen,
            calls=seen.calls + 1,
            later_drop_bytes=max(seen.later_drop_bytes, drop),
            allocated_bytes=max(seen.allocated_bytes, allocated),
            reserved_bytes=max(seen.reserved_bytes, pool),
            probe_seconds=probe_seconds,
        )
