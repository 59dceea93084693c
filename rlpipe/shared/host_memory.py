"""Memory of this machine and of single processes, as Linux counts it."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil


def used_bytes() -> int:
    """What all processes of the machine use and could not be taken from them without writing it elsewhere."""
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


def peak_resident_bytes(processes: Iterable[int]) -> int:
    """Sum of the largest resident sizes of `processes` (process ids) since each started; those that ended count 0.

    Pages that processes share count in each of them.
    """
    total = 0
    for process in processes:
        with suppress(FileNotFoundError, ProcessLookupError):
            status = Path(f"/proc/{process}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    return total
