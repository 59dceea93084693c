"""Metrics of one iteration from the reports of all workers of a phase."""

from collections.abc import Sequence

from rlpipe.jit_monitor.events import JitReport


def jit_metrics(reports: Sequence[JitReport], step_seconds: float) -> dict[str, float]:
    """`perf/jit_*` of one iteration.

    Seconds are those of the slowest rank: the others wait for it at the next collective, so its compilation is what
    the step lost. They never exceed the step, although threads may compile at the same time.
    """
    seconds = min(step_seconds, max((report.seconds for report in reports), default=0.0))
    return {
        "perf/jit_seconds": seconds,
        "perf/jit_compiles": float(sum(report.compiles for report in reports)),
        "perf/jit_alarms": float(sum(len(report.alarms) for report in reports)),
        "perf/step_excluding_jit_seconds": step_seconds - seconds,
    }
