"""Asks the driver how much memory is free, seldom; knows when a shortage begins and ends."""

import gc
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True)
class Reading:
    """What the driver said before or after something. `moment_seconds`: of `time.perf_counter`."""

    free_bytes: int
    total_bytes: int
    moment_seconds: float
    before: str


class Driver(Protocol):
    """The device's memory, as everything on the device sees it, and this process's part of it."""

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes: one call of the driver, nothing else."""

    def allocator(self) -> tuple[int, int]:
        """(allocated, reserved) bytes of PyTorch's pool. Walks statistics: for profiles only."""

    def clean_up(self) -> None:
        """Give what PyTorch's pool holds unused back to the driver."""


class CudaDriver:
    """The present CUDA device."""

    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info()

    def allocator(self) -> tuple[int, int]:
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def clean_up(self) -> None:
        """Blocks that other streams still use are freed only once those are done. Does nothing inside a graph capture,
        which neither may be interrupted."""
        if torch.cuda.is_current_stream_capturing():
            return
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()


@dataclass
class Probe:
    """Readings of `driver`, at most one every `ttl_seconds` unless a fresh one is asked for."""

    driver: Driver
    ttl_seconds: float
    clock: Callable[[], float] = time.perf_counter
    seconds: float = 0.0  # spent in the driver so far
    last: deque[Reading] = field(default_factory=lambda: deque(maxlen=8))

    def read(self, before: str, fresh: bool = False) -> Reading:
        """before: what is about to happen, for error messages."""
        start = self.clock()
        if not fresh and self.last and start - self.last[-1].moment_seconds < self.ttl_seconds:
            return self.last[-1]
        free, total = self.driver.memory()
        now = self.clock()
        self.seconds += now - start
        self.last.append(Reading(free, total, now, before))
        return self.last[-1]


class Shortage:
    """Decides when to clean up, so that a card that stays tight is not cleaned before every call.

    An episode begins below `threshold_bytes` and ends above `recovery` times that. It has one clean-up; a second one
    only when free memory has fallen to half of what the one before left, since then something new is taking it.
    """

    def __init__(self, threshold_bytes: int, recovery: float) -> None:
        self._threshold_bytes = threshold_bytes
        self._recovered_bytes = threshold_bytes * recovery
        self._left_bytes: int | None = None

    def needs_clean_up(self, free_bytes: int) -> bool:
        if free_bytes >= self._recovered_bytes:
            self._left_bytes = None
        if self._left_bytes is None:
            return free_bytes < self._threshold_bytes
        return free_bytes < min(self._left_bytes / 2, self._threshold_bytes)

    def cleaned(self, free_bytes: int) -> None:
        """A clean-up has left `free_bytes`."""
        self._left_bytes = free_bytes
