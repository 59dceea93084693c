"""One iteration's record: its phases, its metrics, and the time that no phase claims."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from rlpipe.monitoring.console import Console
from rlpipe.monitoring.response_record import ResponseRecord
from rlpipe.monitoring.trackers import Trackers
from rlpipe.shared.interrupts import finishing, raise_if_requested, shielded
from rlpipe.shared.phases import PHASES, TRAINING_PARTS, PhaseClock, Span

_ACTOR_PHASES = ("ref_logprob", "old_logprob", *TRAINING_PARTS)


class IterationRecord:
    """Collects what belongs to iteration `number`. Its time starts where the one before ended."""

    def __init__(self, number: int, start_seconds: float, console: Console, devices: int = 1) -> None:
        """devices: all that the run uses, by which its tokens are divided."""
        self.number = number
        self._devices = devices
        self.metrics: dict[str, float] = {}
        self.sample_rows: list[dict[str, object]] = []
        self.transcripts: list[dict[str, object]] = []
        self.responses: ResponseRecord | None = None
        self.until_finished = ExitStack()
        self._clock = PhaseClock()
        # The iteration begins where the one before ended, so writing that one's row is this one's first phase.
        self._clock.add("tracking", time.perf_counter() - start_seconds)
        self._start_seconds = start_seconds
        self._console = console

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Raises KeyboardInterrupt where a signal has come, except after `finish_despite_signals`."""
        raise_if_requested()
        with self._console.phase(self.number, name), self._clock.phase(name):
            yield

    def finish_despite_signals(self, grace_seconds: float) -> None:
        """From here on a signal lets the iteration end, within `grace_seconds`."""
        self.until_finished.enter_context(finishing(grace_seconds))

    def add(self, metrics: Mapping[str, float]) -> None:
        self.metrics.update(metrics)

    def seconds(self, *phases: str) -> float:
        """Seconds so far of the given phases together."""
        return sum(self._clock.seconds.get(phase, 0.0) for phase in phases)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The phases that are over, as they followed each other; `split` divides none of them."""
        return tuple(self._clock.spans)

    def split(self, phase: str, parts: Mapping[str, float], rest: str) -> None:
        """Divide the seconds of `phase` into `parts` as its workers measured them, and `rest`."""
        whole = self._clock.seconds.pop(phase)
        for name, seconds in {**parts, rest: max(0.0, whole - sum(parts.values()))}.items():
            self._clock.add(name, seconds)

    def finish(self) -> float:
        """Add the time metrics; returns the moment the iteration ended."""
        end = time.perf_counter()
        step = end - self._start_seconds
        claimed = self._clock.seconds
        unaccounted = step - sum(claimed.values())
        self.add({f"time/{name}_seconds": claimed.get(name, 0.0) for name in PHASES})
        self.add(
            {
                "time/step_seconds": step,
                "time/unaccounted_seconds": unaccounted,
                "time/unaccounted_share": unaccounted / step,
                "perf/actor_idle_share": 1.0 - self.seconds(*_ACTOR_PHASES) / step,
            }
        )
        if "perf/trained_tokens" in self.metrics:
            rate = self.metrics["perf/trained_tokens"] / step / self._devices
            self.add({"perf/tokens_per_gpu_per_second": rate})
        if "perf/jit_seconds" in self.metrics:
            # Threads and processes compile at the same time, so what they report may exceed the step.
            self.add({"perf/step_excluding_jit_seconds": max(0.0, step - self.metrics["perf/jit_seconds"])})
        return end


class IterationLog:
    """Hands out records whose times touch, and logs each when it ends."""

    def __init__(
        self, trackers: Trackers, console: Console, devices: int, first_metrics: Mapping[str, float] | None = None
    ) -> None:
        """devices: see `IterationRecord`. first_metrics: belong to the start and are logged with the first record."""
        self._trackers = trackers
        self._console = console
        self._devices = devices
        self._first_metrics = first_metrics or {}
        self._end_seconds = time.perf_counter()

    @contextmanager
    def iteration(self, number: int) -> Iterator[IterationRecord]:
        """The record of iteration `number`; writing the row before counts as this one's phase `tracking`."""
        record = IterationRecord(number, self._end_seconds, self._console, self._devices)
        record.add(self._first_metrics)
        self._first_metrics = {}
        with record.until_finished:
            yield record
            self._end_seconds = record.finish()
            with shielded():  # a row is there as a whole or not at all
                self._trackers.log(number, record.metrics)
                if record.sample_rows:
                    self._trackers.log_samples(number, record.sample_rows)
                self._trackers.log_episodes(number, record.transcripts)
                self._trackers.log_responses(number, record.responses)
                self._console.row(number, record.metrics)
