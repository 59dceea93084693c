"""Which compilations are an alarm."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from rlpipe.jit_monitor.events import JitAlarm, JitEvent


class AlarmRules:
    """Before warm-up ends everything may compile. After it any compilation is an alarm, and one that comes back more
    than `recompiles_limit` times for the same kernel says that its cache key never matches."""

    def __init__(self, warmup_steps: int, recompiles_limit: int) -> None:
        self._warmup_steps, self._recompiles_limit = warmup_steps, recompiles_limit
        self._totals: Counter[tuple[str, str]] = Counter()

    def judge(
        self, steps_done: int, step: int, events: Iterable[JitEvent], compiler_seconds: dict[str, float]
    ) -> tuple[JitAlarm, ...]:
        """Alarms of one step, the longest first. A compiler process is one only where no hook explains it."""
        if steps_done < self._warmup_steps:
            return ()
        seconds_by_kernel: dict[tuple[str, str], list[float]] = defaultdict(list)
        for event in events:
            if event.compiled:
                seconds_by_kernel[event.kind, event.name].append(event.seconds)
        if not seconds_by_kernel:
            for name, seconds in compiler_seconds.items():
                seconds_by_kernel["compiler process", name].append(seconds)
        alarms = [self._alarm(step, *kernel, seconds) for kernel, seconds in seconds_by_kernel.items()]
        return tuple(sorted(alarms, key=lambda alarm: -alarm.seconds))

    def _alarm(self, step: int, kind: str, name: str, seconds: list[float]) -> JitAlarm:
        self._totals[kind, name] += len(seconds)
        total = self._totals[kind, name]
        return JitAlarm(kind, name, len(seconds), total, sum(seconds), step, total > self._recompiles_limit)
