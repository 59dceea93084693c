"""Finds compilation where it steals time: in every worker, by kernel, phase and step.

monitor = JitMonitor.install(JitSettings(warmup_steps=1), rank=rank)  # before kernel libraries are imported
with monitor.step(iteration):
    with monitor.phase("forward"):
        ...
report = monitor.drain()
"""

from rlpipe.jit_monitor.alarms import AlarmRules, refuse_alarms
from rlpipe.jit_monitor.caches import cache_environment, worker_caches
from rlpipe.jit_monitor.events import JitAlarm, JitEvent, JitReport, StepStall
from rlpipe.jit_monitor.guards import host_integer, refuse_recompiling_flash_attention
from rlpipe.jit_monitor.jit_metrics import jit_metrics
from rlpipe.jit_monitor.monitor import JitMonitor, JitSettings
from rlpipe.jit_monitor.stall_log import stall_log

__all__ = [
    "AlarmRules",
    "JitAlarm",
    "JitEvent",
    "JitMonitor",
    "JitReport",
    "JitSettings",
    "StepStall",
    "cache_environment",
    "host_integer",
    "jit_metrics",
    "refuse_alarms",
    "refuse_recompiling_flash_attention",
    "stall_log",
    "worker_caches",
]
