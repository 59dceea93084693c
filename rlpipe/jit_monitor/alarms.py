"""Which compilations are an alarm."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from rlpipe.jit_monitor.events import JitAlarm, JitEvent, JitReport
from rlpipe.shared.errors import JitError

# One tuning run compiles each of its configurations, one `torch.compile` several kernels: an alarm names the cause.
_SPEAK_FOR_WHAT_IS_INSIDE = frozenset({"triton_autotune", "dynamo"})


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
        compiles: Counter[tuple[str, str]] = Counter()
        seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        for event in events:
            kernel = event.kind, event.name
            seconds[kernel] += event.seconds
            if event.compiled and event.within not in _SPEAK_FOR_WHAT_IS_INSIDE:
                compiles[kernel] += 1
        if not compiles:
            seconds.update({("compiler process", name): seen for name, seen in compiler_seconds.items()})
            compiles.update({("compiler process", name): 1 for name in compiler_seconds})
        alarms = [self._alarm(step, *kernel, count, seconds[kernel]) for kernel, count in compiles.items()]
        return tuple(sorted(alarms, key=lambda alarm: -alarm.seconds))

    def _alarm(self, step: int, kind: str, name: str, count: int, seconds: float) -> JitAlarm:
        self._totals[kind, name] += count
        total = self._totals[kind, name]
        return JitAlarm(kind, name, count, total, seconds, step, total > self._recompiles_limit)


def refuse_alarms(reports: Sequence[JitReport]) -> None:
    """JitError that names every worker with an alarm, and the kernels; nothing where there is none."""
    sentences = [f"{report.worker}: {alarm}" for report in reports for alarm in report.alarms]
    if sentences:
        raise JitError(f"{'; '.join(sentences)} (jit.after_warmup is 'error')")
