"""Processes and files of an engine that must not outlive it, even when it is killed.

Files are therefore removed as soon as everyone who needs them has opened them, where that is possible. A folder holds a
file that its engine keeps locked; the lock ends with the engine's process, and the next engine removes the folder.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

_TEMPORARY = Path(tempfile.gettempdir())
_PREFIX = "rlpipe-engine-"
_LOCK = "owner.lock"
_SHARED_MEMORY = Path("/dev/shm")
_TERM_SECONDS = 5.0


def engine_directory(instance: str) -> Path:
    """Folder of an engine's sockets and temporary files."""
    return _TEMPORARY / f"{_PREFIX}{instance}"


def claim_directory(instance: str) -> Path:
    """Makes the folder of an engine, which is this process's for as long as it lives."""
    folder = engine_directory(instance)
    # Renamed into place, so that nobody ever sees it unlocked.
    hidden = _TEMPORARY / f".{folder.name}"
    hidden.mkdir()
    _lock(hidden / _LOCK, os.O_CREAT)
    return hidden.rename(folder)


def remove_abandoned() -> None:
    """Removes what engines left whose processes were killed together with their driver."""
    for folder in _TEMPORARY.glob(f"{_PREFIX}*"):
        if _lock(folder / _LOCK):
            remove_files(folder.name.removeprefix(_PREFIX))


def remove_opened_files(instance: str) -> None:
    """Removes what an engine that has started has open already, all in shared memory: SGLang's load file, and the
    message queues between its tensor-parallel ranks."""
    _remove_shared(f"sglang_loads_{instance}_*")
    _remove_queues(psutil.Process().children(recursive=True))


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
    _remove_queues(children)


def avoid_named_semaphores() -> None:
    """Keeps tqdm from making a lock between processes, which is a file in /dev/shm that outlives a killed process."""
    from tqdm.std import TqdmDefaultWriteLock

    TqdmDefaultWriteLock.mp_lock = None


def _remove_queues(owners: Iterable[psutil.Process]) -> None:
    for owner in owners:
        _remove_shared(f"sgl_shm_mq_{owner.pid}_*")


def _remove_shared(pattern: str) -> None:
    for path in _SHARED_MEMORY.glob(pattern):
        path.unlink(missing_ok=True)


def _lock(path: Path, flags: int = 0) -> bool:
    """Takes the lock of `path` for the rest of this process's life; False where another process holds it."""
    try:
        file = os.open(path, os.O_RDWR | flags, 0o600)
    except OSError:  # no engine's folder, another user's, or removed in this moment
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    return True


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
