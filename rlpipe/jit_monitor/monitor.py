"""The monitor of one worker process. Hooks are global to a process, so is the installed monitor: it lives here."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Self

from rlpipe.config.jit import JitConfig
from rlpipe.jit_monitor.after_import import AfterImport
from rlpipe.jit_monitor.alarms import AlarmRules
from rlpipe.jit_monitor.caches import grown_caches
from rlpipe.jit_monitor.events import JitReport, StepStall
from rlpipe.jit_monitor.hooks import all_hooks
from rlpipe.jit_monitor.hooks.wrapping import Attach, Detach
from rlpipe.jit_monitor.recorder import Recorder
from rlpipe.jit_monitor.watchdog import Watchdog

_log = logging.getLogger(__name__)

_SLOW = 1.5  # times the median: such a step's caches are looked at

OnStall = Callable[[StepStall], None]

_installed: "JitMonitor | None" = None


@dataclass(frozen=True)
class JitSettings:
    """warmup_steps: steps in which compiling is expected.

    recompiles_limit: compilations of one kernel after warm-up beyond which it counts as recompiling.
    stall_factor, stall_minimum_seconds: a step longer than both the factor times the median and the minimum is dumped.
    sample_seconds: how often the watchdog looks at a running step.
    """

    warmup_steps: int = 1
    recompiles_limit: int = 3
    stall_factor: float = 5.0
    stall_minimum_seconds: float = 60.0
    sample_seconds: float = 1.0

    @classmethod
    def of(cls, jit: JitConfig) -> Self:
        """Those of a run; the start-up counts as one more step of warm-up."""
        return cls(
            warmup_steps=1 + jit.warmup_iterations,
            stall_factor=jit.stall_factor,
            stall_minimum_seconds=jit.stall_minimum_seconds,
            sample_seconds=min(1.0, jit.stall_minimum_seconds / 4),
        )


class JitMonitor:
    """Install before the first kernel library is imported; wrap each step in `step`, each part of it in `phase`, and
    call `drain` after the step."""

    def __init__(self, settings: JitSettings, rank: int, role: str, on_stall: OnStall | None) -> None:
        self.recorder = Recorder()
        self.unattached: dict[str, str] = {}  # module -> why its hook could not be attached
        self._settings, self._rank, self._role = settings, rank, role
        self._rules = AlarmRules(settings.warmup_steps, settings.recompiles_limit)
        self._after_import = AfterImport()
        self._detach: list[Detach] = []
        self._used: set[str] = set()
        self._steps_done = 0
        self._slow_since: float | None = None  # wall clock at the start of the last step if it was slow
        self._watchdog = Watchdog(
            settings.stall_factor,
            settings.stall_minimum_seconds,
            settings.sample_seconds,
            on_stall or partial(_log.warning, "%s"),
        )
        for module_name, attach in all_hooks():
            self._after_import.call(module_name, partial(self._attach, module_name, attach))

    @classmethod
    def install(
        cls,
        settings: JitSettings | None = None,
        rank: int = 0,
        role: str = "actor",
        on_stall: OnStall | None = None,
    ) -> Self:
        """The process's monitor, made at the first call. RuntimeError at a second one: hooks would count twice.

        on_stall: called while a step stalls, from another thread; by default the stall is logged.
        """
        global _installed
        if _installed is not None:
            raise RuntimeError("a JitMonitor is installed in this process already: use JitMonitor.current()")
        monitor = cls(settings or JitSettings(), rank, role, on_stall)
        _installed = monitor
        return monitor

    @classmethod
    def current(cls) -> "JitMonitor | None":
        """The installed monitor, for code that has no other way to it."""
        return _installed

    def uninstall(self) -> None:
        """Take all hooks back and end the watchdog."""
        global _installed
        self._after_import.remove()
        for detach in reversed(self._detach):
            detach()
        self._detach.clear()
        self._watchdog.stop()
        if _installed is self:
            _installed = None

    @contextmanager
    def step(self, number: int, kind: str = "step") -> Iterator[None]:
        """One training step; `number` is what events and alarms call it. Steps of one kind are alike in length."""
        self.recorder.step = number
        started = time.time()
        self._watchdog.begin(number, kind)
        try:
            yield
        finally:
            ratio = self._watchdog.end()
            if ratio is not None and ratio > _SLOW and self._slow_since is None:
                self._slow_since = started

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step; events of all threads are attributed to the innermost phase."""
        outer, self.recorder.phase = self.recorder.phase, name
        try:
            yield
        finally:
            self.recorder.phase = outer

    def enter_phase(self, name: str) -> None:
        """From now on events belong to phase `name`, for callers that keep track of phases themselves."""
        self.recorder.phase = name

    def first_use(self, group: str, operation: str) -> AbstractContextManager[None]:
        """Around a collective: its first call of each kind in a group sets up the communicator, which takes seconds."""
        name = f"{group}.{operation}"
        if name in self._used:
            return nullcontext()
        self._used.add(name)
        return self.recorder.span("communicator", name, compiled=False)

    def drain(self) -> JitReport:
        """The report of the step that has ended."""
        events = self.recorder.drain()
        stalls, compiler_seconds = self._watchdog.drain()
        alarms = self._rules.judge(self._steps_done, self.recorder.step, events, compiler_seconds)
        grown = () if self._slow_since is None else grown_caches(self._slow_since)
        self._steps_done += 1
        self._slow_since = None
        return JitReport(self.recorder.step, self._rank, events, alarms, stalls, compiler_seconds, grown, self._role)

    def _attach(self, module_name: str, attach: Attach, module: ModuleType) -> None:
        """Attach one hook. A library whose inside has changed is named, not fatal: training does not depend on it."""
        try:
            self._detach.append(attach(module, self.recorder))
        except (AttributeError, ImportError, TypeError) as error:
            self.unattached[module_name] = str(error)
            _log.warning("compilations by %s cannot be seen: %s", module_name, error)
