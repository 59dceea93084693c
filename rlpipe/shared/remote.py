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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rlpipe.shared.errors import DeadlineError, RlpipeError
from rlpipe.shared.interrupts import raise_if_requested
from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "ray._private.state:actors",
    "ray.actor:ActorHandle._actor_id",
    why="where an actor runs that cannot say it, because it is stopped",
    drop_when="ray.util.state tells it without the dashboard",
)

First = TypeVar("First")
Second = TypeVar("Second")
_DUMP_SIGNAL = signal.SIGUSR1
_DUMP_WAIT_SECONDS = 2.0
_LOOK_EVERY_SECONDS = 0.5
_NODE_SECONDS = 30.0
_KILL_SECONDS = 10.0
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class WorkerAddress:
    """Where a worker runs. `node_id` is Ray's; `stacks`: path on that node under which its stacks can be read, empty
    where it has not told that yet."""

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


def address_in_table(actor: Any, name: str) -> WorkerAddress | None:
    """Where an actor runs by what Ray knows, which needs no answer of the actor; None before its process is made."""
    from ray._private.state import actors

    row = actors(actor._actor_id.hex())
    pid, node_id = row.get("Pid"), row.get("Address", {}).get("NodeID")
    return WorkerAddress(name, node_id, pid, stacks="") if pid and node_id else None


def use_interface_of_node() -> None:
    """Point Gloo and NCCL at the interface of this node's address in Ray, unless the user chose one.

    In a local cluster that is the loopback, which elsewhere Gloo would take, too, where the host's name resolves to
    it.
    """
    import psutil
    import ray

    own = ray.util.get_node_ip_address()
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            for variable in _INTERFACE_VARIABLES:
                os.environ.setdefault(variable, interface)


class Watch(Protocol):
    """What `gather` asks its caller while it waits for workers."""

    def look(self) -> None:
        """Called now and then; may raise."""

    def late(self, slow: Sequence[WorkerAddress], seconds: float) -> RlpipeError:
        """What to raise at the deadline."""

    def failed(self, error: Exception, index: int) -> Exception:
        """What to raise for the error that Ray has for the call of worker `index`."""


def gather(
    references: Sequence[Any],
    workers: Sequence[WorkerAddress],
    deadline_seconds: float,
    phase: str,
    watch: Watch | None = None,
) -> list[Any]:
    """Results of `references` (one per worker, same order).

    The first error of a worker is raised, without waiting for the others: as it is, or what `watch` makes of it. Raises
    DeadlineError naming the slow workers, with their stacks, or what `watch` makes of that.
    """
    import ray

    if len(references) != len(workers):
        raise ValueError(f"{len(references)} references for {len(workers)} workers")
    end = time.monotonic() + deadline_seconds
    pending = list(references)
    while pending:
        left = max(0.0, end - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=1, timeout=min(_LOOK_EVERY_SECONDS, left))
        raise_if_requested()
        if not ready and time.monotonic() < end:
            if watch is not None:
                watch.look()
            continue
        if not ready:
            slow = [worker for reference, worker in zip(references, workers, strict=True) if reference in pending]
            raise watch.late(slow, deadline_seconds) if watch else deadline_error(slow, deadline_seconds, phase)
        try:
            ray.get(ready)
        except ray.exceptions.RayError as error:
            if watch is None:
                raise
            raise watch.failed(error, list(references).index(ready[0])) from None
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
    stacks = "\n\n".join(f"--- {worker.name} (pid {worker.pid})\n{stack_of(worker)}" for worker in slow)
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
    if not worker.stacks:
        return "no stack: the process has not answered since it was made"
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


def stack_of(worker: WorkerAddress) -> str:
    """What all threads of the worker are doing, or why that cannot be told."""
    try:
        return str(on_node(worker.node_id, _dump_here, worker))
    except _ray_errors() as error:
        return f"no stack: {type(error).__name__} while asking node {worker.node_id}"


def process_states(workers: Sequence[WorkerAddress]) -> dict[str, str]:
    """By name: "running", "stopped" by a signal, or "gone". A worker whose node does not answer is left out."""
    return _by_node(workers, _states_here)


def kill_processes(workers: Sequence[WorkerAddress]) -> None:
    """End the workers' processes whatever state they are in, and wait until they are gone."""
    _by_node(workers, _kill_here)


def _by_node(
    workers: Sequence[WorkerAddress], function: Callable[[list[WorkerAddress]], dict[str, str]]
) -> dict[str, str]:
    states: dict[str, str] = {}
    for node in dict.fromkeys(worker.node_id for worker in workers):
        there = [worker for worker in workers if worker.node_id == node]
        with suppress(*_ray_errors()):
            states |= on_node(node, function, there)
    return states


def _states_here(workers: list[WorkerAddress]) -> dict[str, str]:
    return {worker.name: _state_here(worker.pid) for worker in workers}


def _state_here(pid: int) -> str:
    import psutil

    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    return {psutil.STATUS_ZOMBIE: "gone", psutil.STATUS_STOPPED: "stopped"}.get(status, "running")


def _kill_here(workers: list[WorkerAddress]) -> dict[str, str]:
    import psutil

    processes = []
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(worker.pid)
            if any("ray::" in word for word in process.cmdline()):  # the id may be another process's by now
                process.kill()
                processes.append(process)
    psutil.wait_procs(processes, timeout=_KILL_SECONDS)
    return _states_here(workers)


def on_node(
    node_id: str, function: Callable[..., First], *arguments: Any, timeout_seconds: float = _NODE_SECONDS
) -> First:
    """The result of `function` on that node: right here, or by a task of Ray's.

    Raises ray.exceptions.RayError when the node does not answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if ray.get_runtime_context().get_node_id() == node_id:
        return function(*arguments)
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(num_cpus=0)(function).options(scheduling_strategy=strategy)
    answer: First = ray.get(task.remote(*arguments), timeout=timeout_seconds)
    return answer


def _ray_errors() -> tuple[type[Exception], ...]:
    """What a call to another node can raise."""
    import ray

    return (ray.exceptions.RayError,)
