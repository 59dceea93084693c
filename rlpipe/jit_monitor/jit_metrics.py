"""Metrics of one iteration from the reports of all workers."""

from collections.abc import Sequence

from rlpipe.jit_monitor.events import JitReport


def jit_metrics(reports: Sequence[JitReport]) -> dict[str, float]:
    """`perf/jit_*` of one iteration.

    Seconds are those of the slowest worker of each role, added up: the others of its role wait for it at the next
    collective or at the end of the rollout, so its compilation is what the iteration lost.
    """
    slowest = [max(seconds) for seconds in _seconds_by_role(reports).values()]
    return {
        "perf/jit_seconds": sum(slowest),
        "perf/jit_compiles": float(sum(report.compiles for report in reports)),
        "perf/jit_alarms": float(sum(len(report.alarms) for report in reports)),
        "perf/jit_stalls": float(sum(len(report.stalls) for report in reports)),
    }


def slowest_seconds(reports: Sequence[JitReport], phases: Sequence[str]) -> float:
    """Seconds that the worker with the most of them spent on events in `phases`."""
    return max((sum(report.seconds_by_phase.get(phase, 0.0) for phase in phases) for report in reports), default=0.0)


def _seconds_by_role(reports: Sequence[JitReport]) -> dict[str, list[float]]:
    roles: dict[str, list[float]] = {}
    for report in reports:
        roles.setdefault(report.role, []).append(report.seconds)
    return roles
