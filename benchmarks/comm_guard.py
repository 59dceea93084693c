"""What the memory guard costs a stream of small collectives: off, skipped, guarded, and probed before every call.

`guarded` is this project's guard with its time-to-live; `probed each time` reads free memory and the allocator's
statistics before every call, as guards around functions of torch.distributed do. The ways take turns within one run,
and shares compare each round with the round of `off` beside it. With GPUs the groups are NCCL's and the driver is
CUDA's; otherwise they are Gloo's, and the machine's free memory stands for the driver's.

    python benchmarks/comm_guard.py --processes 2 --calls 2000 --rounds 15
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from actor.comm_guard.guard import CommGuard
from actor.comm_guard.policy import Policy
from actor.comm_guard.probe import CudaDriver, Driver

OFF, SKIP, GUARD, EACH = "off", "skipped", "guarded", "probed each time"
ELEMENTS = 1024


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


def guard_of(way: str, driver: Driver) -> CommGuard | None:
    """None for `off`. Thresholds are so low that no clean-up is measured."""
    if way == OFF:
        return None
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


def call_seconds(way: str, driver: Driver, collective: Callable[[], object], calls: int) -> float:
    """Of one call, in an iteration after those in which operations settle."""
    guard = guard_of(way, driver)
    if guard is not None:
        guard.install()
    try:
        for _ in range(2):
            for _ in range(20):
                collective()
            if guard is not None:
                guard.take()
        synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            collective()
        synchronize()
        return (time.perf_counter() - start) / calls
    finally:
        if guard is not None:
            guard.uninstall()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def worker(rank: int, processes: int, calls: int, rounds: int, folder: str) -> None:
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
    lines = [f"{processes} processes, {'NCCL' if gpus else 'Gloo'}, {ELEMENTS * 4 // 1024} KiB messages, {calls} calls"]
    for name, collective in streams.items():
        torch.ones(1, device=device).sum().item()
        lines += table(name, measure(driver, collective, calls, rounds))
    if rank == 0:
        Path(folder, "table").write_text("\n".join(lines))
    dist.destroy_process_group()


def measure(driver: Driver, collective: Callable[[], object], calls: int, rounds: int) -> dict[str, list[float]]:
    """Seconds a call by way, one figure a round; the order of ways turns from round to round."""
    ways = [OFF, SKIP, GUARD, EACH]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        first = number % len(ways)
        for way in ways[first:] + ways[:first]:
            seconds[way].append(call_seconds(way, driver, collective, calls))
    return seconds


def table(name: str, seconds: dict[str, list[float]]) -> list[str]:
    lines = []
    for way, values in seconds.items():
        shares = [value / off for value, off in zip(values, seconds[OFF], strict=True)]
        lines.append(
            f"{name:<24} {way:<18} {statistics.median(values) * 1e6:8.2f} microseconds a call, "
            f"{statistics.median(shares):6.3f} x off (fastest rounds: {min(values) / min(seconds[OFF]):6.3f})"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="ranks, one a GPU where there are GPUs")
    parser.add_argument("--calls", type=int, default=2000, help="of each collective, way and round")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(
            worker, (options.processes, options.calls, options.rounds, folder), nprocs=options.processes
        )
        print(Path(folder, "table").read_text())


if __name__ == "__main__":
    main()
