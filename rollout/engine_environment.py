"""Environment variables of an engine's processes. Given to Ray as `runtime_env`, so that nothing else sees them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]

_REPOSITORY = Path(__file__).resolve().parent.parent
_STAND_INS = _REPOSITORY / "rollout" / "cpu_stand_ins"


def engine_environment(
    device: DeviceKind, tensor_parallel: int, directory: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Variables that an engine on `device` needs on top of `inherited`, the environment of the caller.

    `directory` is the engine's own folder for temporary files.
    """
    if device == "cuda":
        return {"PYTHONPATH": _search_path([_REPOSITORY], inherited), "TOKENIZERS_PARALLELISM": "false"}
    return {
        "PYTHONPATH": _search_path([_STAND_INS, _REPOSITORY], inherited),
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_CACHE_DIR": str(directory / "cache"),
        "SGLANG_USE_CPU_ENGINE": "1",
        # More than one thread per process loses up to 50 times on a busy machine: OpenMP threads spin.
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # torch.compile would meet the stand-in for Triton.
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
    } | _thread_binding(tensor_parallel)


def _search_path(first: list[Path], inherited: Mapping[str, str]) -> str:
    rest = [part for part in inherited.get("PYTHONPATH", "").split(os.pathsep) if part]
    return os.pathsep.join([*map(str, first), *rest])


def _thread_binding(tensor_parallel: int) -> dict[str, str]:
    """SGLang refuses more tensor-parallel ranks than NUMA nodes unless it is told the cores of each."""
    if tensor_parallel == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(tensor_parallel))}
