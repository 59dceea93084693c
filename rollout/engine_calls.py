"""Calls to several engines at once: their deadlines, their errors, and what becomes of an engine that fails."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray

from rlpipe.shared.ended_processes import ENDED, last_line, why_ended
from rlpipe.shared.errors import DeadlineError, EngineFailure, RlpipeError
from rlpipe.shared.interrupts import raise_if_requested
from rlpipe.shared.remote import deadline_error
from rollout.fleet import Fleet, RunningEngine

_LOOK_EVERY_SECONDS = 0.5
_IN_VAIN_SECONDS = 20.0


@dataclass(frozen=True)
class EngineCalls:
    """One call to several engines, for `FleetCalls.collect`."""

    engines: tuple[RunningEngine, ...]
    references: tuple[Any, ...]


class FleetCalls:
    """Waits for calls to engines of `fleet`, and reports to it which are lost. Every wait has a deadline."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(
        self, calls: EngineCalls, deadline_seconds: float, phase: str, in_vain: Callable[[], bool] = lambda: False
    ) -> dict[RunningEngine, Any]:
        """Results of the engines that have one, and errors that are not the loss of an engine, as values.

        Engines that fail or are late are lost. in_vain: whether what they wait for will not come; they have some
        seconds more to notice it then.
        """
        results: dict[RunningEngine, Any] = {}
        for engine, result in self._answers(calls, deadline_seconds, phase, in_vain):
            if isinstance(result, EngineFailure | DeadlineError):
                self._fleet.report(engine, EngineFailure(str(result)))
            else:
                results[engine] = result
        return results

    def to_all(self, method: str, *arguments: Any, seconds: float, phase: str) -> list[Any]:
        """Answers of all engines that are up, without those that fail meanwhile."""
        engines = self._fleet.up()
        references = tuple(getattr(engine.actor, method).remote(*arguments) for engine in engines)
        answers = self.collect(EngineCalls(tuple(engines), references), seconds, f"{phase} (engines)")
        for answer in answers.values():
            if isinstance(answer, RlpipeError):
                raise answer
        return [answers[engine] for engine in engines if engine in answers]

    def _answers(
        self, calls: EngineCalls, deadline_seconds: float, phase: str, in_vain: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[RunningEngine, Any]]:
        """Each engine with its result as it comes, or with the error in place of one."""
        engines = dict(zip(calls.references, calls.engines, strict=True))
        pending, end, shortened = list(calls.references), time.monotonic() + deadline_seconds, False
        while pending:
            left = max(0.0, end - time.monotonic())
            ready, pending = ray.wait(pending, num_returns=1, timeout=min(_LOOK_EVERY_SECONDS, left))
            raise_if_requested()
            if not shortened and in_vain():
                shortened, end = True, min(end, time.monotonic() + _IN_VAIN_SECONDS)
            for reference in ready:
                try:
                    result = ray.get(reference)
                except ray.exceptions.RayError as error:
                    result = translate(engines[reference], error)
                yield engines[reference], result
            if not ready and time.monotonic() >= end:
                late = [engines[reference] for reference in pending]
                addresses = [engine.address for engine in late if engine.address is not None]
                too_late = deadline_error(addresses, deadline_seconds, phase)
                yield from ((engine, too_late) for engine in late)
                return


def translate(engine: RunningEngine, error: ray.exceptions.RayError) -> RlpipeError:
    """An engine's own error, or the sentence for an engine that answers nothing."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, RlpipeError):
            return type(cause)(*cause.args)
        return EngineFailure(f"engine {engine.index} failed: {last_line(error)}; log: {engine.setup.log_path}")
    if isinstance(error, ENDED):
        return EngineFailure(
            f"engine {engine.index} died: its process ended unexpectedly ({why_ended(error)}); log: "
            f"{engine.setup.log_path}"
        )
    return EngineFailure(f"Ray failed while talking to engine {engine.index}: {last_line(error)}")
