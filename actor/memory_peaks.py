"""The most memory that this process and its GPU held, iteration by iteration."""

import os

import torch

from rlpipe.shared.host_memory import peak_resident_bytes, used_bytes


class MemoryPeaks:
    """Look when the actor has worked: beside its own memory the GPU then holds what engines keep meanwhile."""

    def __init__(self) -> None:
        self._beside_bytes: int | None = None
        self._host_bytes: int | None = None

    def look(self) -> None:
        """Call at the end of a call that computes, before anything is given back."""
        self._host_bytes = max(self._host_bytes or 0, used_bytes())
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self._beside_bytes = max(self._beside_bytes or 0, total - free - torch.cuda.memory_reserved())

    def take(self) -> dict[str, float]:
        """Metrics since the last call, after which device peaks count anew; {} where nothing was computed."""
        metrics: dict[str, float] = {}
        if self._host_bytes is not None:
            metrics["memory/host_used_bytes"] = float(self._host_bytes)
            metrics["memory/actor_host_peak_bytes"] = float(peak_resident_bytes([os.getpid()]))
        if self._beside_bytes is not None:
            reserved = torch.cuda.max_memory_reserved()
            metrics["memory/actor_gpu_peak_bytes"] = float(reserved + self._beside_bytes)
            metrics["memory/actor_gpu_allocated_peak_bytes"] = float(torch.cuda.max_memory_allocated())
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._beside_bytes = self._host_bytes = None
        return metrics
