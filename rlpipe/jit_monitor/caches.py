"""Where compilers keep what they made: persistent directories, and whether they grew."""

import hashlib
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Directory variables, read by the libraries when they are imported, so they must be in a worker's environment before.
_DIRECTORIES = {
    "triton": "TRITON_CACHE_DIR",
    "inductor": "TORCHINDUCTOR_CACHE_DIR",
    "tilelang": "TILELANG_CACHE_DIR",
    "flash_attention_4": "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "flashinfer": "FLASHINFER_WORKSPACE_BASE",
    "deep_gemm": "DG_JIT_CACHE_DIR",
    "sglang_deep_gemm": "SGLANG_DG_CACHE_DIR",
    "tvm_ffi": "TVM_FFI_CACHE_DIR",
}

# Triton keeps the winners of its tuning on disk, so ranks and restarts choose alike; FlashAttention-4 keeps kernels.
_SWITCHES = {"TRITON_CACHE_AUTOTUNING": "1", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}

_COMPILED_BY = (
    "apache-tvm-ffi",
    "deep-gemm",
    "fla-core",
    "flash-attn-4",
    "flash-qla",
    "flashinfer-python",
    "megatron-core",
    "nvidia-cutlass-dsl",
    "sglang",
    "tilelang",
    "torch",
    "triton",
)

_DEPTH = 2
_MOST_ENTRIES = 4096


def cache_environment(root: Path, image: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that give every compiler a directory under `root / image`, for a Ray runtime environment.

    root: local to the node and kept between runs. image: names the software and the GPU, since what was compiled for
        another image must not be loaded. A variable that `environment` (the process's by default) has stays as it is.
    """
    environment = os.environ if environment is None else environment
    variables = {variable: str(root / image / name) for name, variable in _DIRECTORIES.items()}
    variables |= _SWITCHES
    return {name: environment.get(name, value) for name, value in variables.items()}


def worker_caches(directory: str | None, accelerator: str) -> dict[str, str]:
    """Cache variables of a worker: below `directory`, or on a cluster with an `accelerator` below the home folder.

    {} where neither is given: on a CPU next to nothing compiles.
    """
    if directory is None and not accelerator:
        return {}
    root = Path(directory or "~/.cache/rlpipe/jit").expanduser().absolute()
    return cache_environment(root, software_image(accelerator or "cpu"))


def software_image(accelerator: str) -> str:
    """Name of the software that kernels are compiled by and for: another version of one of these, another name."""
    found = {package: _version(package) for package in _COMPILED_BY}
    digest = hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()
    return f"torch{found['torch']}-{accelerator}-{digest[:8]}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def grown_caches(since_seconds: float, environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Compilers whose cache directory got new entries since `since_seconds` (of `time.time`), for those no hook hears.

    Looks at thousands of directories: for steps under suspicion, not for each one.
    """
    environment = os.environ if environment is None else environment
    roots = {name: environment[variable] for name, variable in _DIRECTORIES.items() if variable in environment}
    return tuple(sorted(name for name, root in roots.items() if newest_change_seconds(root) >= since_seconds))


def newest_change_seconds(root: str) -> float:
    """Newest change of `root` and of the directories up to two levels below; 0 if there is none.

    A new file changes its directory's time, so files need no look. At most 4096 entries are visited.
    """
    newest, level, visited = 0.0, [root], 0
    for _ in range(_DEPTH + 1):
        below: list[str] = []
        for directory in level:
            try:
                newest = max(newest, os.stat(directory).st_mtime)
                with os.scandir(directory) as entries:
                    for entry in entries:
                        visited += 1
                        if visited > _MOST_ENTRIES:
                            return newest
                        if entry.is_dir(follow_symlinks=False):
                            below.append(entry.path)
            except OSError:  # a directory that does not exist, or that another process has just removed
                continue
        level = below
    return newest
