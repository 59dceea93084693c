"""Compilation and stalls in an engine: SGLang compiles in its scheduler processes, which report through files."""

import faulthandler
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from rlpipe.config.jit import JitConfig
from rlpipe.jit_monitor import AlarmRules, JitMonitor, JitReport, JitSettings, StepStall, stall_log
from rlpipe.jit_monitor.event_file import EventFile, EventFolder
from rlpipe.jit_monitor.watchdog import Watchdog

_FILES_VARIABLE = "RLPIPE_JIT_EVENTS"
_DUMP_SIGNAL = signal.SIGUSR1
_NEVER_SECONDS = 86400.0  # there are no steps to look at in a scheduler


def install_in_scheduler() -> None:
    """Call in a scheduler process before kernel libraries are imported. Does nothing where no engine asked for it."""
    prefix = os.environ.get(_FILES_VARIABLE)
    if prefix:
        faulthandler.register(_DUMP_SIGNAL, all_threads=True)
        monitor = JitMonitor.install(JitSettings(sample_seconds=_NEVER_SECONDS), role="engine")
        monitor.recorder.on_event = EventFile(Path(f"{prefix}.{os.getpid()}.jsonl")).append


class JitWatch:
    """The engine's side: make it before the scheduler processes start.

    A stretch in which requests run is a step for the watchdog. When one takes far longer than those before it, this
    process's stacks go to `engine-<i>.stalls.txt`, and those of the schedulers to the engine's log.

    schedulers: gives their process ids; by default they are looked for among this process's children.
    """

    def __init__(
        self, engine: int, log_path: Path, jit: JitConfig, schedulers: Callable[[], Sequence[int]] | None = None
    ) -> None:
        prefix = log_path.with_suffix(".jit")
        for left in log_path.parent.glob(f"{prefix.name}.*.jsonl"):
            left.unlink()
        os.environ[_FILES_VARIABLE] = str(prefix)
        self._engine = engine
        self._schedulers = schedulers or _scheduler_children
        self._events = EventFolder(log_path.parent, f"{prefix.name}.*.jsonl")
        settings = JitSettings.of(jit)
        self._rules = AlarmRules(settings.warmup_steps, settings.recompiles_limit)
        self._taken = 0
        self._iteration = 0
        self._running = 0
        self._write = stall_log(f"engine-{engine}", log_path.parent)
        self._watchdog = Watchdog(
            settings.stall_factor, settings.stall_minimum_seconds, settings.sample_seconds, self._on_stall
        )
        self._watchdog.begin(0, "start")

    def begin(self, requests: int) -> None:
        """So many requests begin to run."""
        if self._running == 0:
            self._watchdog.begin(self._iteration, "generate")
        self._running += requests

    def end(self, requests: int) -> None:
        self._running -= requests
        if self._running == 0:
            self._watchdog.end()

    def take(self, iteration: int) -> JitReport:
        """What compiled since the last call, which belongs to `iteration`. The first call ends the start-up."""
        events = self._events.read("rollout" if self._taken else "start", iteration)
        stalls, compiler_seconds = self._watchdog.drain()
        alarms = self._rules.judge(self._taken, iteration, events, compiler_seconds)
        self._taken += 1
        self._iteration = iteration + 1
        if self._taken == 1 or self._running:  # a stretch that has not ended is cut here
            self._watchdog.end()
        if self._running:
            self._watchdog.begin(self._iteration, "generate")
        return JitReport(iteration, self._engine, events, alarms, stalls, compiler_seconds, role="engine")

    def stop(self) -> None:
        self._watchdog.stop()

    def _on_stall(self, stall: StepStall) -> None:
        self._write(stall)
        for scheduler in self._schedulers():
            with suppress(ProcessLookupError):
                os.kill(scheduler, _DUMP_SIGNAL)


def _scheduler_children() -> list[int]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "scheduler" in child.name():
                found.append(child.pid)
    return found
