"""What the guard's tests run inside spawned workers, on real Gloo groups with a driver that says what it is told."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensor_bits import bits
from torch._C._distributed_c10d import Work
from torch.distributed import ProcessGroup

from actor.collectives.exchange_timer import ExchangeTimer
from actor.collectives.interception import listen, take_unknown_calls
from actor.comm_guard.guard import CommGuard
from actor.comm_guard.observer import Observer
from actor.comm_guard.rules import Policy, Stack, load_policy
from actor.rank_clock import RankClock

GLOO = ("gloo",)


class ToldDriver:
    """A driver whose free memory the test sets; a clean-up frees nothing."""

    def __init__(self) -> None:
        self.free_bytes, self.clean_ups = 500, 0

    def memory(self) -> tuple[int, int]:
        return self.free_bytes, 1000

    def allocator(self) -> tuple[int, int]:
        return 0, 0

    def clean_up(self) -> None:
        self.clean_ups += 1


def guard(driver: ToldDriver, policy: Policy | None = None, **options: Any) -> CommGuard:
    return CommGuard(policy or Policy(), driver, ttl_seconds=0.0, recovery=1.25, **({"backends": GLOO} | options))


def calls(rank: int, count: int) -> dict[str, Any]:
    """Every collective that Gloo has, by the name the caller uses: each returns the tensors it wrote."""

    def mine() -> torch.Tensor:
        return torch.arange(float(count)) * 1.1 + rank

    def empty(size: int) -> torch.Tensor:
        return torch.zeros(size)

    def wrote(function: Any, output: Any, *arguments: Any, **named: Any) -> Any:
        function(output, *arguments, **named)
        return output

    def objects() -> list[Any]:
        return wrote(dist.all_gather_object, [None] * count, {"rank": rank})

    def broadcast_objects() -> list[Any]:
        return wrote(dist.broadcast_object_list, [rank, "text"], 0)

    def batch() -> list[torch.Tensor]:
        received = empty(count)
        operations = [
            dist.P2POp(dist.isend, mine(), (rank + 1) % count),
            dist.P2POp(dist.irecv, received, (rank - 1) % count),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [received]

    parts = [mine() + index for index in range(count)]
    return {
        "all_reduce": lambda: [wrote(dist.all_reduce, mine())],
        "all_gather": lambda: wrote(dist.all_gather, [empty(count) for _ in range(count)], mine()),
        "all_gather_into_tensor": lambda: [wrote(dist.all_gather_into_tensor, empty(count * count), mine())],
        "_all_gather_base": lambda: [wrote(dist._all_gather_base, empty(count * count), mine())],
        "reduce_scatter_tensor": lambda: [wrote(dist.reduce_scatter_tensor, empty(1), mine())],
        "_reduce_scatter_base": lambda: [wrote(dist._reduce_scatter_base, empty(1), mine())],
        "all_to_all_single": lambda: [wrote(dist.all_to_all_single, empty(count), mine())],
        "broadcast": lambda: [wrote(dist.broadcast, mine(), 0)],
        "reduce": lambda: [wrote(dist.reduce, mine(), 0)],
        "reduce_scatter": lambda: [wrote(dist.reduce_scatter, empty(count), parts)],
        "gather": lambda: wrote_gather(rank, count, mine()),
        "scatter": lambda: [wrote(dist.scatter, empty(count), parts if rank == 0 else None, src=0)],
        "barrier": lambda: [] if dist.barrier() is None else [],
        "batch_isend_irecv": batch,
        "all_gather_object": objects,
        "broadcast_object_list": broadcast_objects,
    }


def wrote_gather(rank: int, count: int, tensor: torch.Tensor) -> list[torch.Tensor]:
    output = [torch.zeros(count) for _ in range(count)] if rank == 0 else None
    dist.gather(tensor, output, dst=0)
    return output or []


def probes_by_alias(rank: int, count: int) -> dict[str, Any]:
    """Probes of each call, its results without and with the guard, and the methods that stay replaced."""
    functions = calls(rank, count)
    plain = {name: bits(function()) for name, function in functions.items()}
    methods = dict(vars(ProcessGroup))
    watching = guard(ToldDriver())
    watching.install()
    probes, guarded = {}, {}
    for name, function in functions.items():
        guarded[name] = bits(function())
        probes[name] = watching.take()["guard/checks"]
    watching.uninstall()
    return {"probes": probes, "plain": plain, "guarded": guarded, "replaced": replaced_methods(methods)}


def replaced_methods(methods: dict[str, Any]) -> list[str]:
    """Names in ProcessGroup that are other than in `methods`, or come on top."""
    now = dict(vars(ProcessGroup))
    return sorted(name for name in now.keys() | methods.keys() if now.get(name) is not methods.get(name))


def episodes(rank: int, count: int) -> dict[str, Any]:
    """Clean-ups while memory is short, worse, well again, and short again; then the calls on unwatched groups."""
    driver = ToldDriver()
    watching = guard(driver)
    watching.install()
    clean_ups = []
    for free_bytes in (500, 39, 39, 45, 39, 19, 19, 500, 39):  # the threshold is 40
        driver.free_bytes = free_bytes
        dist.all_reduce(torch.ones(2))
        clean_ups.append(driver.clean_ups)
    watching.uninstall()
    unwatched = guard(driver, backends=("nccl",))
    unwatched.install()
    dist.all_reduce(torch.ones(2))
    metrics = unwatched.take()
    unwatched.uninstall()
    return {"clean_ups": clean_ups, "unwatched": metrics["guard/checks"] + metrics["guard/skips"]}


def default_policy(rank: int, count: int) -> list[dict[str, float]]:
    """Three iterations of a skipped and a guarded operation: the first use is probed, later only the guarded one."""
    watching = guard(ToldDriver(), load_policy())
    watching.install()
    found = []
    for _ in range(3):
        for _ in range(5):
            dist.all_to_all_single(torch.zeros(count), torch.ones(count))
        dist.all_reduce(torch.ones(2))
        found.append(watching.take())
    watching.uninstall()
    return found


def failures(rank: int, count: int) -> list[Any]:
    """What an operation's failure says: for want of memory, and for another reason."""
    entry = vars(ProcessGroup)["allreduce"]
    found = []
    for message in ("CUDA error: out of memory", "connection closed"):

        def fail(group: Any, *arguments: Any, message: str = message) -> None:
            raise RuntimeError(message)

        ProcessGroup.allreduce = fail
        watching = guard(ToldDriver())
        watching.install()
        try:
            dist.all_reduce(torch.ones(1024))
        except Exception as error:
            found.append((type(error).__name__, " ".join([str(error), *getattr(error, "__notes__", [])])))
        watching.uninstall()
        ProcessGroup.allreduce = entry
    return found


def observed(rank: int, count: int, folder: str, driver_version: str) -> dict[str, Any]:
    """An observer's run: the first all_reduce takes 100 bytes, each broadcast 7; returns its two sets of metrics."""
    driver = ToldDriver()
    stack = Stack(device="told", driver=driver_version.format(rank=rank), nccl="2", torch=torch.__version__)
    observer = Observer(driver, stack, Path(folder), rank, backends=GLOO)
    methods = dict(vars(ProcessGroup))

    def taking(name: str, amounts: list[int]) -> Any:
        original = methods[name]

        def take(group: Any, *arguments: Any) -> Any:
            driver.free_bytes -= amounts.pop(0)
            return original.__get__(group)(*arguments)

        return take

    ProcessGroup.allreduce = taking("allreduce", [100, 0, 0])
    ProcessGroup.broadcast = taking("broadcast", [7, 7 + rank])
    observer.install()
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    first = observer.take()
    for _ in range(2):
        dist.broadcast(torch.ones(30_000), 0)
    dist.all_to_all_single(torch.zeros(count), torch.ones(count))
    second = observer.take()
    observer.uninstall()
    for name in ("allreduce", "broadcast"):
        setattr(ProcessGroup, name, methods[name])
    return {"metrics": [first, second], "replaced": replaced_methods(methods)}


def ages(rank: int, count: int) -> list[int]:
    """Driver calls after each of six calls, one a second, with readings believed for two and a half seconds."""
    driver = ToldDriver()
    asked = [0]
    memory = driver.memory

    def count_calls() -> tuple[int, int]:
        asked[0] += 1
        return memory()

    driver.memory = count_calls
    now = [0.0]
    policy = Policy(guard_first_use=False)
    watching = CommGuard(policy, driver, ttl_seconds=2.5, recovery=1.25, backends=GLOO, clock=lambda: now[0])
    watching.install()
    found = []
    for moment in range(6):
        now[0] = float(moment)
        dist.all_reduce(torch.ones(2))
        found.append(asked[0])
    watching.uninstall()
    return found


def coalesced(rank: int, count: int) -> dict[str, Any]:
    """Metrics and results of operations started together, and of what functional collectives start."""
    watching = guard(ToldDriver())
    watching.install()
    tensors = [torch.ones(2) * (rank + 1), torch.ones(3)]
    with dist._coalescing_manager(async_ops=False):
        for tensor in tensors:
            dist.all_reduce(tensor)
    together = watching.take()["guard/checks"]
    from torch.distributed import _functional_collectives as functional

    result = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    functional.wait_tensor(result)
    watching.uninstall()
    return {"sum": tensors[0][0].item(), "together": together, "functional": result.tolist()}


def short_way(rank: int, count: int) -> dict[str, Any]:
    """Results and counts of settled operations under every alias and call form, then of one that fails."""
    functions = calls(rank, count)
    plain = {name: bits(function()) for name, function in functions.items()}
    entry, broken = vars(ProcessGroup)["allreduce"], [False]

    def allreduce(group: Any, *arguments: Any, **named: Any) -> Any:
        if broken[0]:
            raise RuntimeError("connection closed")
        return entry.__get__(group)(*arguments, **named)

    ProcessGroup.allreduce = allreduce
    watching = guard(ToldDriver(), Policy(default="skip"))
    watching.install()
    for _ in range(2):
        for function in functions.values():
            function()
        watching.take()
    settled = {name: bits(function()) for name, function in functions.items()}
    group, tensor = dist.group.WORLD, torch.ones(2)
    group.allreduce(tensors=[tensor], opts=dist.AllreduceOptions()).wait()
    group.allreduce([tensor]).wait()
    metrics = watching.take()
    broken[0] = True
    try:
        dist.all_reduce(torch.ones(2))
    except RuntimeError as error:
        notes = " ".join(error.__notes__)
    watching.uninstall()
    ProcessGroup.allreduce = entry
    return {"plain": plain, "settled": settled, "sum": tensor.tolist(), "metrics": metrics, "notes": notes}


def two_listeners(rank: int, count: int) -> dict[str, Any]:
    """What clock and guard saw of one all_reduce each time: both, the guard alone, the clock alone, none of them."""
    methods, wait = dict(vars(ProcessGroup)), vars(Work)["wait"]
    clock, watching = RankClock(), guard(ToldDriver())
    clock.keep_spans = True

    def seen() -> tuple[int, float]:
        with clock.part("train"):
            dist.all_reduce(torch.ones(2))
        spans = clock.take()[1]
        return sum(span.name == "exchange" for span in spans), watching.take()["guard/checks"]

    leave = listen(ExchangeTimer(clock))
    watching.install()
    found = [seen()]
    leave()
    found.append(seen())
    leave_again = listen(ExchangeTimer(clock))
    watching.uninstall()
    found.append(seen())
    leave_again()
    leave()
    found.append(seen())
    replaced = replaced_methods(methods) + ["Work.wait"] * (vars(Work)["wait"] is not wait)
    return {"seen": found, "replaced": replaced}


def unknown_operation(rank: int, count: int) -> dict[str, Any]:
    """A torch whose process groups have an operation that the table lacks: what is counted, timed, guarded, said."""
    ProcessGroup.teleport = lambda group, tensors: dist.group.WORLD.size()
    clock, watching = RankClock(), guard(ToldDriver())
    clock.keep_spans = True
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("actor.collectives.interception").addHandler(handler)
    used: list[tuple[str, str]] = []

    @contextmanager
    def first_use(group: str, operation: str) -> Iterator[None]:
        used.append((group, operation))
        yield

    leave = listen(ExchangeTimer(clock, first_use))
    watching.install()
    with clock.part("train"):
        sizes = [dist.group.WORLD.teleport([torch.ones(2)]) for _ in range(3)]
    checks, spans = watching.take()["guard/checks"], clock.take()[1]
    calls = [take_unknown_calls(), take_unknown_calls()]
    watching.uninstall()
    leave()
    plain = dist.group.WORLD.teleport([])
    del ProcessGroup.teleport
    exchanges = sum(span.name == "exchange" for span in spans)
    return {
        **{"sizes": [*sizes, plain], "checks": checks, "exchanges": exchanges, "calls": calls},
        **{"warnings": warnings, "used": [operation for _, operation in used], "after": take_unknown_calls()},
    }


def barriers(rank: int, count: int) -> int:
    """Exchanges that the clock sees in a monitored barrier, which blocks."""
    clock = RankClock()
    clock.keep_spans = True
    leave = listen(ExchangeTimer(clock))
    with clock.part("train"):
        dist.monitored_barrier()
    leave()
    return sum(span.name == "exchange" for span in clock.take()[1])
