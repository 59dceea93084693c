"""Compilation in an engine: SGLang compiles in its scheduler processes, which report through files."""

import logging
import math
import os
from pathlib import Path

from rlpipe.config.jit import JitConfig
from rlpipe.jit_monitor import AlarmRules, JitMonitor, JitReport, JitSettings
from rlpipe.jit_monitor.event_file import EventFile, EventFolder
from rlpipe.jit_monitor.watchdog import Watchdog

_FILES_VARIABLE = "RLPIPE_JIT_EVENTS"
_LOOK_SECONDS = 1.0
_NEVER_SECONDS = 86400.0  # there are no steps to look at in a scheduler

_log = logging.getLogger(__name__)


def install_in_scheduler() -> None:
    """Call in a scheduler process before kernel libraries are imported. Does nothing where no engine asked for it."""
    prefix = os.environ.get(_FILES_VARIABLE)
    if prefix:
        monitor = JitMonitor.install(JitSettings(sample_seconds=_NEVER_SECONDS), role="engine")
        monitor.recorder.on_event = EventFile(Path(f"{prefix}.{os.getpid()}.jsonl")).append


class JitWatch:
    """The engine's side: make it before the scheduler processes start."""

    def __init__(self, engine: int, log_path: Path, settings: JitConfig) -> None:
        prefix = log_path.with_suffix(".jit")
        for left in log_path.parent.glob(f"{prefix.name}.*.jsonl"):
            left.unlink()
        os.environ[_FILES_VARIABLE] = str(prefix)
        self._engine = engine
        self._events = EventFolder(log_path.parent, f"{prefix.name}.*.jsonl")
        self._rules = AlarmRules(1 + settings.warmup_iterations, JitSettings.recompiles_limit)
        self._taken = 0
        self._compilers = Watchdog(math.inf, math.inf, _LOOK_SECONDS, _log.warning)
        self._compilers.begin(0)

    def take(self, iteration: int) -> JitReport:
        """What compiled since the last call, which belongs to `iteration`. The first call ends the start-up."""
        events = self._events.read("rollout" if self._taken else "start", iteration)
        _, compiler_seconds = self._compilers.drain()
        alarms = self._rules.judge(self._taken, iteration, events, compiler_seconds)
        self._taken += 1
        return JitReport(iteration, self._engine, events, alarms, (), compiler_seconds, role="engine")

    def stop(self) -> None:
        self._compilers.stop()
