"""What a failed collective says: which one it was, and what memory looked like."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from actor.comm_guard.probe import Driver, Reading
from rlpipe.shared.errors import ResourceError


@dataclass(frozen=True)
class Call:
    """One call. size_bytes: of the larger side of its message."""

    operation: str
    group: str
    ranks: int
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.operation} of {mebibytes(self.size_bytes)} in group {self.group} of {self.ranks} ranks"


def mebibytes(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:,.2f} MiB"


def explain(error: RuntimeError, call: Call, driver: Driver, probes: Iterable[Reading]) -> None:
    """Raises ResourceError for want of memory; otherwise leaves a note in `error`, which the caller raises again."""
    memory = f"{_memory_now(driver)}; {_past(probes)}"
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ResourceError(
            f"{call} ran out of device memory: {memory}. Lower actor.max_tokens_per_gpu or rollout.engine's share of "
            f"the device, or set actor.comm_guard.mode to enforce with a higher threshold ({first_line})"
        ) from error
    error.add_note(f"in {call}; {memory}")


def _memory_now(driver: Driver) -> str:
    try:
        free, total = driver.memory()
        allocated, reserved = driver.allocator()
    except RuntimeError as error:  # a failed collective can leave a device that answers nothing
        return f"memory cannot be read any more ({str(error).splitlines()[0]})"
    return (
        f"driver has {mebibytes(free)} of {mebibytes(total)} free, PyTorch holds {mebibytes(reserved)} and uses "
        f"{mebibytes(allocated)} of it"
    )


def _past(probes: Iterable[Reading]) -> str:
    now = time.perf_counter()
    parts = [
        f"{mebibytes(reading.free_bytes)} free {now - reading.moment_seconds:.2f} s ago, before {reading.before}"
        for reading in reversed(list(probes))
    ]
    return "last probes: " + "; ".join(parts) if parts else "no probe so far"
