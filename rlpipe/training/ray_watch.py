"""Ray's own processes on this machine: what happens when one of them is lost.

Then nothing more can be asked of Ray. Its library blocks, for minutes or for good, and one of its threads may end this
process at any moment without a word (after 60 seconds without a GCS). So this thread says what happened, ends all
processes that the run has started, and leaves.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NoReturn

import psutil

from rlpipe.shared.descendants import descendants, end_descendants, end_of, is_stopped
from rlpipe.shared.errors import EXIT_CODE
from rlpipe.shared.interrupts import INTERRUPTED, INTERRUPTED_EXIT_CODE, requested
from rlpipe.shared.replaced_parts import relies_on
from rollout.cleanup import remove_abandoned

relies_on(
    "ray.core.src.ray.raylet.raylet",
    texts=("marked as dead",),
    why="a raylet's log says that the GCS gave it up; nothing else tells",
    drop_when="its exit code tells",
)
relies_on(
    "ray.core.src.ray.gcs.gcs_server",
    texts=("marked dead", "missed too many heartbeats"),
    why="a raylet's log says that the GCS gave it up; nothing else tells",
    drop_when="its exit code tells",
)

_POLL_SECONDS = 0.1
_STOPPED_SECONDS = 10.0
_CONNECT_SECONDS = 5.0
_CONNECT_FAILURES = 4
_OVERLOAD = 4.0  # processes ready to run, for each core
_NAMES = {"gcs_server": "GCS", "raylet": "raylet"}
_DECLARED_DEAD = ("marked as dead", "marked dead", "missed too many heartbeats")


@dataclass(frozen=True)
class SystemProcess:
    """One of Ray's own processes. `logs`: the folder that it writes to."""

    name: str
    pid: int
    logs: Path


def system_processes() -> list[SystemProcess]:
    """GCS and raylet of a cluster that this process has started."""
    found = []
    for process in descendants():
        try:
            name, words = process.name(), process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if name in _NAMES:
            found.append(SystemProcess(_NAMES[name], process.pid, _log_folder(words)))
    return found


class RayWatch(threading.Thread):
    """Looks after the cluster at `address` (host:port of its GCS) until `stop`.

    processes: those of Ray that are children of this process. last_words: what to say after the cause.
    """

    def __init__(self, address: str, processes: list[SystemProcess], last_words: Callable[[], Iterable[str]]) -> None:
        super().__init__(name="ray-watch", daemon=True)
        self._address = address
        self._processes = processes
        self._last_words = last_words
        self._stopped = threading.Event()
        self._leaving = threading.Lock()
        self._stopped_since: dict[int, float] = {}
        self._failures = 0

    def run(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS if self._processes else _CONNECT_SECONDS):
            cause = self._cause()
            if cause is not None:
                self._leave(cause)

    def stop(self) -> None:
        """Call before Ray is shut down. Does not return when Ray is lost already, noticed or not."""
        self._stopped.set()
        cause = self._cause()
        if cause is not None:
            self._leave(cause)
        self.join()

    def _cause(self) -> str | None:
        for process in self._processes:
            end = end_of(process.pid) or self._stop_of(process)
            if end is not None:
                return f"the {process.name} of this machine (pid {process.pid}) is lost: {end}{_why(process)}"
        return None if self._processes or self._answers() else f"no GCS answers at {self._address} any more"

    def _stop_of(self, process: SystemProcess) -> str | None:
        if not is_stopped(process.pid):
            self._stopped_since.pop(process.pid, None)
            return None
        since = self._stopped_since.setdefault(process.pid, time.monotonic())
        return "it was stopped by a signal" if time.monotonic() - since > _STOPPED_SECONDS else None

    def _answers(self) -> bool:
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
            self._failures = 0
        except OSError:
            self._failures += 1
        return self._failures < _CONNECT_FAILURES

    def _leave(self, cause: str) -> NoReturn:
        self._leaving.acquire()  # the first one leaves, and takes whoever comes later with it
        end_descendants(term_seconds=0)  # before Ray's other processes print what they think of it
        remove_abandoned()
        if requested():  # a signal to the whole process group, Ray's processes included
            leave(INTERRUPTED_EXIT_CODE, INTERRUPTED, self._last_words())
        leave(EXIT_CODE, f"error: ray: {cause}", self._last_words())


def leave(exit_code: int, text: str, more: Iterable[str] = ()) -> NoReturn:
    """End this process at once, past all that libraries do when the interpreter ends. `more` is said as it comes, and
    nothing else any more: what other threads say would stand in the middle of the sentence."""
    sys.stdout.flush()
    said = sys.stderr
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for part in chain((text,), more):
        print(part, end="", file=said, flush=True)
    print(file=said, flush=True)
    os._exit(exit_code)


def _why(process: SystemProcess) -> str:
    """The reason as far as it can be known, and where to look."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    words = ""
    if _was_declared_dead(process.logs):
        words += ", declared dead because it did not answer in time"
    if load > _OVERLOAD * cores:
        words += f", machine overloaded (load {load:.0f} on {cores} cores)"
    return f"{words}; log: {process.logs}"


def _was_declared_dead(logs: Path) -> bool:
    text = "".join(_tail(logs / name) for name in ("raylet.out", "raylet.err"))
    return any(words in text for words in _DECLARED_DEAD)


def _tail(path: Path, size_bytes: int = 65_536) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _log_folder(words: list[str]) -> Path:
    options = dict(word.lstrip("-").split("=", 1) for word in words if word.startswith("--") and "=" in word)
    folder = options.get("log_dir") or f"{options.get('session_dir', '/tmp/ray/session_latest')}/logs"
    return Path(folder)
