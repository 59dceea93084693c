"""What the memory guard costs a stream of small collectives: off, skipped, guarded, and probed before every call.

`guarded` is this project's guard with its time-to-live; `probed each time` reads free memory and the allocator's
statistics before every call, as guards around functions of torch.distributed do. The ways take turns every few calls,
because a host's speed drifts by more than what is measured. Medians of those blocks are compared, and means too: only
they feel the probes of `guarded`, which here come four times as often per call as in a stream without turns. `a skip by
itself` is what skipping adds to a collective that does nothing. With GPUs the groups are NCCL's and the driver is
CUDA's; otherwise they are Gloo's, and the machine's free memory stands for the driver's.

    python benchmarks/comm_guard.py --processes 2 --blocks 600
"""

import argparse
import math
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch._C._distributed_c10d import ProcessGroup

from actor.collectives.operations import OPERATIONS, methods_of
from actor.comm_guard.guard import CommGuard
from actor.comm_guard.probe import CudaDriver, Driver
from actor.comm_guard.rules import Policy

OFF, SKIP, GUARD, EACH = WAYS = ["off", "skipped", "guarded", "probed each time"]
CALLS = 10
ELEMENTS = 1024

Methods = dict[str, Any]


class MachineMemory:
    """The machine's memory in place of a device's; has no pool to clean."""

    def memory(self) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def allocator(self) -> tuple[int, int]:
        return 0, 0

    def clean_up(self) -> None: ...


class WithStatistics:
    """A driver whose every reading also walks the allocator's statistics."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.allocator, self.clean_up = driver.allocator, driver.clean_up

    def memory(self) -> tuple[int, int]:
        self._driver.allocator()
        return self._driver.memory()


def guard_of(way: str, driver: Driver) -> CommGuard:
    """Thresholds are so low that no clean-up is measured."""
    threshold = {"size_bytes": 1}
    policy = Policy.model_validate({"threshold": threshold, "default": "skip" if way == SKIP else "guard"})
    each = way == EACH
    return CommGuard(
        policy,
        WithStatistics(driver) if each else driver,
        ttl_seconds=0.0 if each else 0.05,
        recovery=1.25,
        backends=("nccl", "gloo"),
    )


@contextmanager
def methods_by_way(driver: Driver, collectives: Iterable[Callable[[], object]]) -> Iterator[dict[str, Methods]]:
    """The methods that each way gives ProcessGroup, after an iteration in which operations settle."""
    untouched = dict(vars(ProcessGroup))
    methods: dict[str, Methods] = {}
    guards = []
    operations = {name: operation for operation in OPERATIONS for name in methods_of(operation, untouched)}
    methods[OFF] = {name: untouched[name] for name in operations}
    for way in WAYS[1:]:
        guard = guard_of(way, driver)
        guards.append(guard)
        methods[way] = {name: guard.around(operations[name], getattr(ProcessGroup, name)) for name in operations}
        use(methods[way])
        for _ in range(2):  # every size class is new in the first iteration, none in the second
            for collective in collectives:
                collective()
            guard.take()
        use(methods[OFF])
    yield methods
    use(methods[OFF])
    for guard in guards:
        guard.uninstall()


def skipping_seconds(driver: Driver, collective: Callable[[], object]) -> float:
    """What a skipped call adds, measured where collectives do nothing: there no peer's delays hide it."""
    untouched = dict(vars(ProcessGroup))
    silent = {name: lambda *_: None for operation in OPERATIONS for name in methods_of(operation, untouched)}
    use(silent)
    try:
        with methods_by_way(driver, [collective]) as methods:
            seconds = {OFF: math.inf, SKIP: math.inf}
            for _ in range(500):
                for way in seconds:
                    use(methods[way])
                    seconds[way] = min(seconds[way], timeit.timeit(collective, number=100) / 100)
    finally:
        use({name: untouched[name] for name in silent})
    return seconds[SKIP] - seconds[OFF]


def use(methods: Methods) -> None:
    for name, method in methods.items():
        setattr(ProcessGroup, name, method)


def measure(methods: dict[str, Methods], collective: Callable[[], object], blocks: int) -> dict[str, list[float]]:
    """Seconds a call by way, one figure a block; the order of ways turns from round to round."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(blocks):
        first = number % len(WAYS)
        for way in WAYS[first:] + WAYS[:first]:
            use(methods[way])
            collective()  # the first call of a replaced method looks it up anew
            synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                collective()
            synchronize()
            seconds[way].append((time.perf_counter() - start) / CALLS)
    return seconds


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def worker(rank: int, processes: int, blocks: int, folder: str) -> None:
    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(rank)
    device, driver = ("cuda", CudaDriver()) if gpus else ("cpu", MachineMemory())
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("nccl" if gpus else "gloo", store=store, rank=rank, world_size=processes)
    small = torch.ones(ELEMENTS, device=device)
    part = torch.ones(ELEMENTS // processes, device=device)
    streams: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(small),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(small, part),
        "all_to_all_single": lambda: dist.all_to_all_single(small, small.clone()),
    }
    backend = "NCCL" if gpus else "Gloo"
    lines = [f"{processes} processes, {backend}, {ELEMENTS * 4 // 1024} KiB messages, {blocks} blocks of {CALLS} calls"]
    alone = {name: skipping_seconds(driver, collective) for name, collective in streams.items()}
    with methods_by_way(driver, streams.values()) as methods:
        for name, collective in streams.items():
            lines += table(name, measure(methods, collective, blocks), alone[name])
    if rank == 0:
        Path(folder, "table").write_text("\n".join(lines))
    dist.destroy_process_group()


def table(name: str, seconds: dict[str, list[float]], skipping: float) -> list[str]:
    off = seconds[OFF]
    typical = statistics.median(off)
    lines = [f"{name:<24} {OFF:<18} {typical * 1e6:8.2f} us a call"]
    for way in WAYS[1:]:
        share, mean = statistics.median(seconds[way]) / typical, statistics.fmean(seconds[way]) / statistics.fmean(off)
        lines.append(f"{'':<24} {way:<18} {share:8.3f} x off ({interval(seconds[way], off)}); means {mean:.3f} x")
    lines.append(f"{'':<24} a skip by itself   {skipping * 1e6:8.2f} us, {skipping / typical:.2%} of off")
    return lines


def interval(values: list[float], off: list[float]) -> str:
    """95 % of the ratios of medians when rounds are drawn again and again from those measured (bootstrap)."""
    generator = np.random.default_rng(0)
    rounds = generator.integers(0, len(off), (1000, len(off)))
    ratios = np.median(np.array(values)[rounds], axis=1) / np.median(np.array(off)[rounds], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return f"{low:.3f} to {high:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="ranks, one a GPU where there are GPUs")
    parser.add_argument("--blocks", type=int, default=600, help="of calls, for each collective and way")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(worker, (options.processes, options.blocks, folder), nprocs=options.processes)
        print(Path(folder, "table").read_text())


if __name__ == "__main__":
    main()
