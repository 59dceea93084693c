"""Processes that import what SGLang stands on while the engine's own process imports SGLang, and then become its
schedulers. A scheduler is a process of its own, which SGLang starts when all of the engine's imports are done.

Nothing of SGLang is imported in them before, nor packages of kernels: they read variables then that the engine sets
later. Where one that the others may have read has changed, or SGLang asks for a program around the interpreter
(numactl, on machines of several NUMA nodes), a process of multiprocessing's own is started as ever, and the waiting one
ends; the engine's log says so.
"""

import gc
import json
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import spawn, util
from typing import Any, Self

import setproctitle

_LOG = logging.getLogger(__name__)

_STANDS_ON = (
    "torch",
    "transformers.masking_utils",
    "transformers.models.llama",
    "openai.types.responses",
    "fastapi",
    "aiohttp",
    "xgrammar",
    "compressed_tensors.config",
    "IPython.display",
)
"""Of other packages, what takes longest of a scheduler's imports."""

_READ_EARLY = (
    *("LD_", "PYTHON", "GLIBC_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NPY_", "CUDA_VISIBLE_"),
    *("ATEN_", "TORCH", "PYTORCH_", "TRITON_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "USE_", "XGRAMMAR_"),
)
"""Beginnings of variables that are read as a process begins, or as these packages are imported or made ready."""

_READ_LATER = (
    *("PYTHONPATH", "LD_LIBRARY_PATH"),
    *("TORCH_CUDA_ARCH_LIST", "TRITON_F32_DEFAULT", "TRITON_PTXAS_BLACKWELL_PATH"),
)
"""But not these, which packages set where the engine imports them. multiprocessing sends Python's path along. That of
libraries (OpenCV's package, where it is installed, adds to it) did not count in the engine either, which found the same
libraries without it, and goes to what a scheduler starts. The others are read when something is compiled."""

_KEPT_DESCRIPTORS = 256
"""Numbers below are kept free in a waiting process: what it gets has to have the engine's numbers."""

_SIZE_BYTES = 8


@dataclass(frozen=True)
class _Waiting:
    pid: int
    engine: socket.socket


class SchedulersAhead:
    """`count` processes, started with the environment of now. Those that are not used end with the block, or when this
    process ends."""

    def __init__(self, count: int, imports: Sequence[str] = _STANDS_ON) -> None:
        self._environment = dict(os.environ)
        self._executable = spawn.get_executable()
        self._waiting = [_start(self._executable, imports) for _ in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._waiting:
            waiting = self._waiting.pop()
            waiting.engine.close()
            _end(waiting.pid)

    @contextmanager
    def become_spawned(self) -> Iterator[None]:
        """In the block, processes that multiprocessing spawns are those that wait, as long as there are some.

        Its `popen_spawn_posix` gives a process's command and descriptors to `util.spawnv_passfds`, and sends the rest
        through one of them.
        """
        plain = util.spawnv_passfds

        def spawned(path: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
            taken = self._hand_over(path, arguments, descriptors)
            return plain(path, arguments, descriptors) if taken is None else taken

        util.spawnv_passfds = spawned  # type: ignore[assignment]
        try:
            yield
        finally:
            util.spawnv_passfds = plain

    def _hand_over(self, path: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int | None:
        """The process's id, or None where it has to be another process."""
        if not self._waiting or not spawn.is_forking(arguments[-2:]):  # of which the first is Python's own text
            return None
        if reason := self._reason_against(path, descriptors):
            _LOG.warning("a process of multiprocessing's own becomes a scheduler: %s", reason)
            return None
        waiting = self._waiting.pop(0)
        message = json.dumps([arguments[-2], dict(os.environ), list(descriptors)]).encode()
        try:
            socket.send_fds(waiting.engine, [len(message).to_bytes(_SIZE_BYTES)], list(descriptors))
            waiting.engine.sendall(message)
        except OSError as error:
            _LOG.warning("a process that was to become a scheduler is gone: %s", error)
            _end(waiting.pid)
            return None
        finally:
            waiting.engine.close()
        return waiting.pid

    def _reason_against(self, path: Any, descriptors: Sequence[int]) -> str:
        """Why no waiting process is what is asked for; empty where one is."""
        if path != self._executable:
            return f"it is started by {os.fsdecode(path)}"
        if max(descriptors) >= _KEPT_DESCRIPTORS:
            return f"it gets the descriptor {max(descriptors)}, and {_KEPT_DESCRIPTORS - 1} is the last one kept for it"
        changed = {name for name, _ in self._environment.items() ^ os.environ.items()}
        read = sorted(name for name in changed if name.startswith(_READ_EARLY) and name not in _READ_LATER)
        return f"{', '.join(read)} changed after it was started" if read else ""


def _start(executable: Any, imports: Sequence[str]) -> _Waiting:
    ours, theirs = socket.socketpair()
    call = f"become_scheduler({theirs.fileno()}, {tuple(imports)!r})"
    program = f"from rollout.scheduler_ahead import become_scheduler; {call}"
    flags = spawn.get_command_line()[:-3]
    with theirs:
        return _Waiting(util.spawnv_passfds(executable, [*flags, "-c", program], [theirs.fileno()]), ours)


def _end(pid: int) -> None:
    """Of a child, which may have ended and been waited for."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def become_scheduler(descriptor: int, imports: Sequence[str]) -> None:
    """The waiting process: imports, then runs what the engine sends through the socket `descriptor`."""
    gc.disable()  # as `SchedulerEntry` says
    begin = time.monotonic()
    kept = _keep_low_descriptors()
    setproctitle.getproctitle()  # finds the title's place, which it cannot after the environment has changed
    leave_megatron_out()
    for name in imports:
        with suppress(ImportError):  # SGLang does without it, or says so itself
            import_module(name)
    imported = time.monotonic()
    with socket.socket(fileno=descriptor) as engine:
        size, received, _, _ = socket.recv_fds(engine, _SIZE_BYTES, _KEPT_DESCRIPTORS, socket.MSG_WAITALL)
        if not size:
            return  # the engine needs no scheduler, or is gone
        message = engine.recv(int.from_bytes(size), socket.MSG_WAITALL)
    program, environment, numbers = json.loads(message)
    for number in kept:
        os.close(number)
    for number, wanted in zip(received, numbers, strict=True):
        os.dup2(number, wanted)
        os.close(number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", "--multiprocessing-fork"]
    waited = time.monotonic() - imported
    print(f"a scheduler to be imported for {imported - begin:.1f} s, then waited {waited:.1f} s", flush=True)
    spawn.spawn_main(**{name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", program)})


def leave_megatron_out() -> None:
    """A debugging module of SGLang imports Megatron-core where it exists, which takes seconds."""
    sys.modules["megatron.core"] = None  # type: ignore[assignment]


def _keep_low_descriptors() -> list[int]:
    """Opened so that nothing else gets their numbers."""
    kept = [os.open(os.devnull, os.O_RDONLY)]
    while kept[-1] < _KEPT_DESCRIPTORS - 1:
        kept.append(os.dup(kept[0]))
    return kept
