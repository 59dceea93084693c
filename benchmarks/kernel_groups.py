"""Where a device's time goes: seconds of a profiled call by kind of kernel."""

import gzip
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

GROUPS = (
    ("exchanges", r"nccl|^c10d::"),
    ("quantisation", r"group_quant|quant_fp8|quant_8bit"),
    ("fused element-wise", r"^triton_(poi|red|per)_|^_swiglu|^_gates|^_sum_rows|^_softmax_parts|^_logit_"),
    ("grouped GEMM", r"group(ed)?_?(mm|gemm)|GroupProblemShape|fused_moe"),
    ("short convolution", r"causal_conv|^_convolve|^_gradients$"),
    (
        "Gated DeltaNet",
        r"chunk|delta|kkt|_wy_|recompute_w_u|solve_tri|merge_16x16|l2norm|tilelang|^kernel_kernel$|qla|gdr",
    ),
    ("softmax attention", r"flash|fmha|scaled_dot_product|dot_do_o|convert_dq|^_fwd_(grouped_)?kernel"),
    ("norms", r"norm|rms|GammaBeta"),
    ("dense GEMM", r"gemm|nvjet|cutlass|_matmul|xmma|cublas|gemv|splitK|aten::(mm|addmm|bmm)$"),
    ("sort", r"moe_align|sort|radix|topk|^_choose|bitonic|scan|cumsum"),
    ("index and scatter", r"^_spread|index|scatter|gather|embedding|masked"),
    ("copies, casts, cat, fill", r"copy|memcpy|memset|fill|CatArray|aten::(cat|clone|zero_)$"),
    (
        "element-wise and sums",
        r"elementwise|reduce|softmax|silu|sigmoid|aten::(add_?|mul|sum|exp|sub|neg)$",
    ),
)
"""Kinds of kernels and the pattern of their names; the first that matches counts. `kernel_kernel` is TileLang's, which
Gated DeltaNet alone uses."""

_EXCHANGES = "exchanges"
_TRACE_SECONDS = 60.0
_DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class KernelTime:
    """All runs of one kernel."""

    name: str
    seconds: float
    calls: int


@dataclass(frozen=True)
class Profile:
    """Kernels of a call, and seconds in which any of them runs that exchanges nothing with other processes; of
    operators on a machine without a GPU, whose seconds add up."""

    times: list[KernelTime]
    busy_seconds: float


def profiled(call: Callable[[], object]) -> Profile:
    """The device's kernels of `call`, which must end with a synchronization; operators on a machine without a GPU."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        call()
    events = [event for event in recorded.key_averages() if not event.key.startswith("autograd::")]
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    if not kernels:
        times = [KernelTime(event.key, event.self_cpu_time_total / 1e6, event.count) for event in events]
        return Profile(times, sum(one.seconds for one in times if group_of(one.name) != _EXCHANGES))
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == DeviceType.CUDA and group_of(event.name) != _EXCHANGES
    ]
    times = [KernelTime(event.key, event.self_device_time_total / 1e6, event.count) for event in kernels]
    return Profile(times, covered(spans) / 1e6)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of `spans`, each (start, end)."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def trace_times(path: Path) -> tuple[list[KernelTime], float]:
    """Of a Chrome trace that torch's profiler wrote: its kernels, and seconds from the first to the last one's end."""
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("cat") in _DEVICE_EVENTS]
    micros: dict[str, list[float]] = defaultdict(list)
    for event in events:
        micros[event["name"]].append(event["dur"])
    span = max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events)
    return [KernelTime(name, sum(each) / 1e6, len(each)) for name, each in micros.items()], span / 1e6


def print_trace(folder: Path, steps: int) -> None:
    """Waits for the trace of `steps` decoding steps that SGLang writes into `folder`, and prints it by kinds."""
    waited = time.monotonic() + _TRACE_SECONDS
    while not (found := list(folder.glob("*.json.gz"))) and time.monotonic() < waited:
        time.sleep(1)
    time.sleep(1)  # it is written in one go, but not renamed into place
    times, span_seconds = trace_times(found[0])
    print(f"decoding under a profiler, {steps} steps of {span_seconds / steps * 1e3:.2f} ms")
    print_groups(times)


def group_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    return next((group for group, pattern in GROUPS if re.search(pattern, kernel, re.IGNORECASE)), "other")


def print_groups(times: list[KernelTime], shown_share: float = 0.05) -> None:
    """Milliseconds and share of every kind, and single kernels that take at least `shown_share` of all time."""
    members: dict[str, list[KernelTime]] = defaultdict(list)
    for one in times:
        members[group_of(one.name)].append(one)
    total = sum(one.seconds for one in times)
    print(f"  {total * 1e3:.1f} ms of kernels in {sum(one.calls for one in times):,} calls")
    for group, kernels in sorted(members.items(), key=lambda item: -_seconds(item[1])):
        print(f"  {group:24}{_seconds(kernels) * 1e3:9.2f} ms{_seconds(kernels) / total:8.1%}")
        shown = [one for one in kernels if one.seconds >= shown_share * total]
        for one in sorted(shown, key=lambda kernel: -kernel.seconds):
            print(f"      {one.seconds * 1e3:9.2f} ms {one.calls:6} x {one.name[:90]}")


def _seconds(times: list[KernelTime]) -> float:
    return sum(one.seconds for one in times)
