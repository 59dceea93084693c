"""Processes that work at once, each on a share of this machine's cores, which all that it starts inherits."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.queues import SimpleQueue
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def shares(cores: list[int], jobs: int) -> list[list[int]]:
    """Cores of each of `jobs`, as equal as they can be; with fewer cores than jobs, some are shared."""
    if jobs >= len(cores):
        return [[cores[job % len(cores)]] for job in range(jobs)]
    return [cores[len(cores) * job // jobs : len(cores) * (job + 1) // jobs] for job in range(jobs)]


class Workers:
    """A pool of `jobs` processes, each with its share of the cores that this process may use."""

    def __init__(self, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        queue: SimpleQueue[list[int]] = context.SimpleQueue()
        for share in shares(sorted(os.sched_getaffinity(0)), jobs):
            queue.put(share)
        self._pool = ProcessPoolExecutor(jobs, context, _stay_on, (queue,))

    def submit(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> Future[T]:
        return self._pool.submit(function, *arguments, **named)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)


def _stay_on(queue: "SimpleQueue[list[int]]") -> None:
    os.sched_setaffinity(0, queue.get())
