"""The table of a run: what `rlpipe plan` said of each quantity, and what each iteration measured."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PHASES = (
    *("step", "rollout", "reward", "sleep_wake", "ref_logprob", "old_logprob", "advantage", "pack", "forward"),
    *("backward", "optimizer", "exchange", "train_other", "weight_sync", "eval", "checkpoint", "tracking"),
    "unaccounted",
)


@dataclass(frozen=True)
class Row:
    """A line of a run's table: a metric and the planned figure beside it, what both are multiplied with, their form."""

    title: str
    metric: str
    planned: str = ""
    scale: float = 1.0
    form: str = ",.2f"


ROWS = [
    *(Row(f"{phase} s", f"time/{phase}_seconds", phase) for phase in _PHASES),
    Row("passes and exchange s", "forward_backward", "forward_backward"),
    Row("tokens/s/GPU, whole step", "perf/tokens_per_gpu_per_second", form=",.0f"),
    Row("rollout tokens/s", "perf/rollout_tokens_per_second", "rollout_tokens_per_second", form=",.0f"),
    Row("rollout tokens/s/GPU", "perf/rollout_tokens_per_gpu_per_second", form=",.0f"),
    Row("tokens of a response", "rollout/response_tokens_mean", form=",.0f"),
    Row("actor tokens/s", "perf/actor_tokens_per_second", form=",.0f"),
    Row("actor TFLOP/s/GPU, whole phase", "perf/actor_train_tflops_per_gpu", form=",.1f"),
    Row("actor MFU, whole phase %", "perf/actor_train_mfu", scale=100, form=",.1f"),
    Row("exposed optimizer % of it", "perf/optimizer_exposed_share", scale=100, form=",.1f"),
    Row("ref log-prob TFLOP/s/GPU", "perf/ref_logprob_tflops_per_gpu", form=",.1f"),
    Row("weight sync GB/s", "weight_sync/gigabytes_per_second", form=",.1f"),
    Row("compile s", "perf/jit_seconds"),
    Row("compiles", "perf/jit_compiles", form=",.0f"),
    Row("GPU peak, engine works GB", "memory/engine_gpu_peak_bytes", "engine_gpu_bytes", 1e-9, ",.1f"),
    Row("GPU peak, actor works GB", "memory/actor_gpu_peak_bytes", "actor_gpu_bytes", 1e-9, ",.1f"),
    Row("actor's tensors at peak GB", "memory/actor_gpu_allocated_peak_bytes", "actor_tensor_bytes", 1e-9, ",.1f"),
    Row("host GB, less before the run", "host_used_by_run", "host_bytes", 1e-9, ",.1f"),
    Row("host peak of actor GB", "memory/actor_host_peak_bytes", scale=1e-9, form=",.1f"),
    Row("host peak of engines GB", "memory/engine_host_peak_bytes", scale=1e-9, form=",.1f"),
    Row("packs", "pack/packs_count", form=",.0f"),
    Row("pack fill %", "pack/fill_share", scale=100, form=",.1f"),
    Row("engines restarted", "fault/engine_restarts_count", form=",.0f"),
    Row("|SGLang - Megatron| mean", "mismatch/logprob_abs_mean", form=".4f"),
    Row("start to first token s", "perf/start_to_first_token_seconds", form=",.1f"),
]


def run_lines(
    title: str,
    planned: Mapping[str, float],
    iterations: Sequence[Mapping[str, float]],
    start_seconds: Mapping[str, float],
) -> list[str]:
    """Quantities down, `plan` and iterations across. What neither has is left out."""
    lines = ["", title, f"{'':32}{'plan':>12}" + "".join(f"{int(row['iteration']):>12}" for row in iterations)]
    for row in ROWS:
        values = [planned.get(row.planned), *(iteration.get(row.metric) for iteration in iterations)]
        if any(values):
            lines.append(f"{row.title:32}" + "".join(cell(value, row, 12) for value in values))
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in start_seconds.items())
    return [*lines, f"start, s: {parts}"] if parts else lines


def start_seconds(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each part of the start, which the run's first row tells."""
    return {
        found[1]: seconds
        for row in rows[:1]
        for key, seconds in row.items()
        if (found := re.fullmatch(r"start/(\w+)_seconds", key))
    }


def derived(row: Mapping[str, float], host_before_bytes: int) -> dict[str, float]:
    """An iteration's metrics with the figures that are made of others."""
    used = row["memory/host_used_bytes"] - host_before_bytes
    passes = sum(row[f"time/{phase}_seconds"] for phase in ("forward", "backward", "exchange"))
    return {**row, "forward_backward": passes, "host_used_by_run": used}


def cell(value: float | None, row: Row, width: int) -> str:
    """Blank where there is no value."""
    return " " * width if value is None else f"{value * row.scale:>{width}{row.form}}"
