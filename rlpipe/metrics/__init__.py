"""Every metric of the system, declared once: name, unit, meaning, and how values of several ranks become one."""

from rlpipe.metrics.dictionary import METRICS, Metric, Reduce, check_names, reduce_over_ranks

__all__ = ["METRICS", "Metric", "Reduce", "check_names", "reduce_over_ranks"]
