"""Environment variables of an engine's processes. Given to Ray as `runtime_env`, so that nothing else sees them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "sglang.srt.distributed.bootstrap:_check_tp_memory_balance",
    texts=("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK",),
    why="an engine of several GPUs starts beside an actor that holds more of one than of another",
    drop_when="SGLang compares nothing but memory that an engine needs",
)

DeviceKind = Literal["cpu", "cuda"]

_REPOSITORY = Path(__file__).resolve().parent.parent
_STAND_INS = _REPOSITORY / "rollout" / "cpu_stand_ins"
_COMMON = {
    "TOKENIZERS_PARALLELISM": "false",
    # It ends an engine where one of its GPUs has a tenth less free than another. Pools have room on the fullest anyway.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
}


def engine_environment(
    device: DeviceKind, tensor_parallel: int, directory: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Variables that an engine on `device` needs on top of `inherited`, the environment of the caller.

    `directory` is the engine's own folder for temporary files.
    """
    if device == "cuda":
        return _COMMON | {"PYTHONPATH": _search_path([_REPOSITORY], inherited)}
    return {
        **_COMMON,
        "PYTHONPATH": _search_path([_STAND_INS, _REPOSITORY], inherited),
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
