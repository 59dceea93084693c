"""Remote calls with a deadline: a call that is late fails with the stack of the worker that is slow.

Each worker registers a dump of all its threads on a signal (`faulthandler`, which needs neither the interpreter lock
nor a responsive worker). When a deadline passes, a task on the worker's node sends the signal and reads the dump.
"""

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlpipe.shared.errors import DeadlineError

First = TypeVar("First")
Second = TypeVar("Second")
_DUMP_SIGNAL = signal.SIGUSR1
_DUMP_WAIT_SECONDS = 2.0
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class WorkerAddress:
    """Where a worker runs. `node_id` is Ray's; `stacks`: path on that node under which its stacks can be read."""

    name: str
    node_id: str
    pid: int
    stacks: str


def register_worker(name: str) -> WorkerAddress:
    """Call in the worker process, once, at its start: its stacks can be read from outside, other nodes be reached."""
    import ray

    use_interface_of_node()
    # A file without a name ends with the worker, however that ends.
    dump = os.memfd_create("stacks")
    faulthandler.register(_DUMP_SIGNAL, file=dump, all_threads=True)
    pid = os.getpid()
    return WorkerAddress(name, ray.get_runtime_context().get_node_id(), pid, f"/proc/{pid}/fd/{dump}")


def use_interface_of_node() -> None:
    """In a cluster of several nodes, point Gloo and NCCL at the interface of Ray's address, unless the user chose one.

    Gloo otherwise takes what the host's name resolves to, which on many hosts is the loopback.
    """
    import psutil
    import ray

    if sum(node["Alive"] for node in ray.nodes()) < 2:
        return
    own = ray.util.get_node_ip_address()
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            for variable in _INTERFACE_VARIABLES:
                os.environ.setdefault(variable, interface)


def gather(
    references: Sequence[Any], workers: Sequence[WorkerAddress], deadline_seconds: float, phase: str
) -> list[Any]:
    """Results of `references` (one per worker, same order).

    The first error of a worker is raised as it is, without waiting for the others; raises DeadlineError naming the
    slow workers, with their stacks.
    """
    import ray

    if len(references) != len(workers):
        raise ValueError(f"{len(references)} references for {len(workers)} workers")
    end = time.monotonic() + deadline_seconds
    pending = list(references)
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            slow = [worker for reference, worker in zip(references, workers, strict=True) if reference in pending]
            raise deadline_error(slow, deadline_seconds, phase)
        ray.get(ready)
    return ray.get(list(references))


def together(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """What both waits return, for two sides that wait for each other.

    The first error is raised at once; the wait of the other side ends when its workers are stopped.
    """
    threads = ThreadPoolExecutor(2)
    try:
        one, other = threads.submit(first), threads.submit(second)
        sides: list[Future[Any]] = [one, other]
        for done in wait(sides, return_when=FIRST_EXCEPTION).done:
            done.result()
        return one.result(), other.result()
    finally:
        threads.shutdown(wait=False)


def deadline_error(slow: Sequence[WorkerAddress], deadline_seconds: float, phase: str) -> DeadlineError:
    """The error that names the slow workers and shows what they are doing."""
    stacks = "\n\n".join(f"--- {worker.name} (pid {worker.pid})\n{_stack(worker)}" for worker in slow)
    names = ", ".join(worker.name for worker in slow)
    return DeadlineError(
        f"{phase}: no answer from {names} within {deadline_seconds:g} seconds; raise the deadline in the "
        f"`deadlines` section if that is too short. Stacks:\n{stacks}"
    )


def cluster_accelerator() -> str:
    """What Ray calls the cluster's GPUs, `H200` for instance; empty where there are none."""
    import ray

    resources = ray.cluster_resources()
    names = sorted(name.partition(":")[2] for name in resources if name.startswith("accelerator_type:"))
    return ("-".join(names) or "gpu") if resources.get("GPU") else ""


def _dump_here(worker: WorkerAddress) -> str:
    path = Path(worker.stacks)
    try:
        before = path.stat().st_size
        os.kill(worker.pid, _DUMP_SIGNAL)
        end = time.monotonic() + _DUMP_WAIT_SECONDS
        while time.monotonic() < end and path.stat().st_size == before:
            time.sleep(0.05)
        time.sleep(0.05)
        stacks = path.read_bytes()[before:].decode(errors="replace").strip()
    except (ProcessLookupError, FileNotFoundError):
        return "the process has ended"
    return stacks or "no stack: the process did not react to the signal"


def _stack(worker: WorkerAddress) -> str:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0)(_dump_here).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(worker.node_id, soft=False)
    )
    try:
        return ray.get(task.remote(worker), timeout=30)
    except ray.exceptions.RayError as error:
        return f"no stack: {type(error).__name__} while asking node {worker.node_id}"
