"""Processes and files of an engine that must not outlive it, even when it is killed.

Files are therefore removed as soon as everyone who needs them has opened them, where that is possible.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

_TEMPORARY = Path(tempfile.gettempdir())
_SHARED_MEMORY = Path("/dev/shm")
_TERM_SECONDS = 5.0


def engine_directory(instance: str) -> Path:
    """Folder of an engine's sockets and temporary files."""
    return _TEMPORARY / f"rlpipe-engine-{instance}"


def remove_opened_files(instance: str) -> None:
    """Removes what an engine that has started has open already: SGLang's load file in shared memory."""
    for path in _SHARED_MEMORY.glob(f"sglang_loads_{instance}_*"):
        path.unlink(missing_ok=True)


def remove_files(instance: str) -> None:
    """Removes all that an engine left on this machine: shared memory, sockets, temporary files."""
    remove_opened_files(instance)
    shutil.rmtree(engine_directory(instance), ignore_errors=True)


def end_children() -> None:
    """Ends all processes below this one, except multiprocessing's resource tracker.

    The tracker ends by itself with this process, and then removes the semaphores of the others.
    """
    children = [child for child in psutil.Process().children(recursive=True) if not _is_resource_tracker(child)]
    for child in children:
        _quietly(child.terminate)
    _, alive = psutil.wait_procs(children, timeout=_TERM_SECONDS)
    for child in alive:
        _quietly(child.kill)
    psutil.wait_procs(alive, timeout=_TERM_SECONDS)


def avoid_named_semaphores() -> None:
    """Keeps tqdm from making a lock between processes, which is a file in /dev/shm that outlives a killed process."""
    from tqdm.std import TqdmDefaultWriteLock

    TqdmDefaultWriteLock.mp_lock = None


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _quietly(action: Callable[[], None]) -> None:
    try:
        action()
    except psutil.NoSuchProcess:
        return
