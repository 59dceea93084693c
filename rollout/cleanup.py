"""Processes and files of an engine that must not outlive it, even when it is killed.

Files are therefore removed as soon as everyone who needs them has opened them, where that is possible. A folder holds a
file that its engine keeps locked; the lock ends with the engine's process, and the next engine removes the folder.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from rlpipe.shared.replaced_parts import replaces
from rlpipe.shared.socket_folder import socket_folder

replaces(
    "tqdm.std:TqdmDefaultWriteLock.mp_lock",
    why="its lock between processes is a file in /dev/shm that outlives a killed process",
    drop_when="tqdm makes it when it is first needed",
)

_TEMPORARY = socket_folder()
_PREFIX = "rlpipe-engine-"
_LOCK = "owner.lock"
_SHARED_MEMORY = Path("/dev/shm")
_TERM_SECONDS = 5.0
_POLL_SECONDS = 0.02
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


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


def end_engine(pid: int, instance: str) -> None:
    """Ends an engine's processes at once, from outside, and removes its files.

    It may be stopped, or dead already and its children with other parents, so they are told by the folder that was made
    for them.
    """
    folder = str(engine_directory(instance))
    processes = [process for process in psutil.process_iter() if _is_of(process, pid, folder)]
    for process in processes:
        _quietly(process.kill)
    end = time.monotonic() + _TERM_SECONDS
    while any(_status(process) not in _ENDED for process in processes) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    psutil.wait_procs(processes, timeout=0)  # those that have become this process's children are zombies until then
    _remove_queues(processes)
    remove_files(instance)


def has_stopped_process(pid: int) -> bool:
    """Whether the process or one below it was stopped (SIGSTOP)."""
    try:
        engine = psutil.Process(pid)
        family = [engine, *engine.children(recursive=True)]
    except psutil.NoSuchProcess:
        return False
    return any(_status(process) == psutil.STATUS_STOPPED for process in family)


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


def _is_of(process: psutil.Process, pid: int, folder: str) -> bool:
    if process.pid == pid:
        return True
    try:
        inherits = process.environ().get("TMPDIR") == folder
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return inherits and not _is_resource_tracker(process)


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)


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
