"""What an engine's processes and GPUs hold. Asks the driver through NVML: this process has no CUDA context, which would
take memory of its own."""

import ctypes
import os
from collections.abc import Sequence

import psutil

from rlpipe.shared.host_memory import peak_resident_bytes
from rollout.engine_environment import DeviceKind


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class EngineMemory:
    """The most that the engine's GPUs held when it was looked at, and its processes at any time."""

    def __init__(self, device: DeviceKind) -> None:
        self._on_gpu = device == "cuda"
        self._gpu_bytes = 0

    def look(self) -> None:
        """Call when requests have just ended, before anything is given back."""
        if self._on_gpu:
            self._gpu_bytes = max(self._gpu_bytes, *used_gpu_bytes(visible_gpus()))

    def take(self) -> dict[str, float]:
        """Metrics since the last call."""
        own = psutil.Process()
        processes = [own.pid, *(child.pid for child in own.children(recursive=True))]
        metrics = {"memory/engine_host_peak_bytes": float(peak_resident_bytes(processes))}
        if self._gpu_bytes:
            metrics["memory/engine_gpu_peak_bytes"] = float(self._gpu_bytes)
        self._gpu_bytes = 0
        return metrics


def visible_gpus() -> list[str]:
    """This process's GPUs as CUDA_VISIBLE_DEVICES names them: indices or UUIDs."""
    return [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",") if name.strip()]


def used_gpu_bytes(gpus: Sequence[str]) -> list[int]:
    """Memory in use on each GPU, by all processes; 0 where the driver does not say."""
    return [int(memory.used) for memory in _memory_of(gpus)]


def total_gpu_bytes(gpus: Sequence[str]) -> list[int]:
    """Memory of each GPU; 0 where the driver does not say."""
    return [int(memory.total) for memory in _memory_of(gpus)]


def _memory_of(gpus: Sequence[str]) -> list[_NvmlMemory]:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # a container that was given the GPU without the driver's tools
        return [_NvmlMemory() for _ in gpus]
    nvml.nvmlInit_v2()
    found = []
    for gpu in gpus:
        handle, memory = ctypes.c_void_p(), _NvmlMemory()
        if gpu.isdecimal():
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(gpu)), ctypes.byref(handle))
        else:
            failed = nvml.nvmlDeviceGetHandleByUUID(gpu.encode(), ctypes.byref(handle))
        if not failed:
            nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        found.append(memory)
    return found
