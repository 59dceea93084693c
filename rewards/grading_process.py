"""One grading process as its owner sees it: start it, ask it, end it with everything it started."""

import fnmatch
import logging
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rewards.grading_channel import OwnerChannel
from rlpipe.shared.secret_text import Secrets

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_MARK = "RLPIPE_GRADING_PROCESS"
_SWEEPS = 20
_SHOWN_OUTPUT_BYTES = 2000
_READ_BYTES = 2**16
_READS_AT_ONCE = 16
_LOG = logging.getLogger(__name__)


class WorkerProcess:
    """A running `rewards.grading_worker` in a session of its own.

    It is a fresh interpreter and not a fork: the caller has threads and possibly a CUDA context. It sees only those of
    our environment variables that `variables` (names, or patterns with `*`) allow, and what it prints comes through a
    pipe, of which the beginning is logged, without secrets. `ask` belongs to one thread, which also calls `end`, once.
    `answered` counts its answers, `strays` those that belonged to no request of the time.
    """

    def __init__(self, memory_bytes: int, variables: Sequence[str], secrets_to_hide: Secrets) -> None:
        self._secrets = secrets_to_hide
        ours, theirs = socket.socketpair()
        self._mark = secrets.token_hex(16)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rewards.grading_worker", str(theirs.fileno()), str(memory_bytes)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(os.environ, variables) | {_MARK: self._mark},
            )
        self._channel = OwnerChannel(ours)
        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._output_open = True
        self._printed = b""
        self._lock = threading.Lock()
        self._ended = False
        self.answered = 0
        self.strays = 0

    def wait_until_ready(self, timeout_seconds: float) -> None:
        """Raises TimeoutError if it is not in time; EOFError, OSError or ForgedAnswer if it cannot start."""
        self._channel.receive(time.monotonic() + timeout_seconds, self._wait)

    def ask(self, request: tuple[Any, ...], timeout_seconds: float) -> dict[str, Any]:
        """Send a request and receive its answer, both within the limit; raises like `wait_until_ready`.

        An answer carries the number of its request, which nothing else can guess; others are dropped and counted.
        """
        number, deadline = secrets.token_hex(16), time.monotonic() + timeout_seconds
        self._channel.send(pickle.dumps((number, request)), deadline, self._wait)
        while True:
            answer = self._channel.receive(deadline, self._wait)
            if answer.get("id") == number:
                self.answered += 1
                return answer
            self.strays += 1

    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process, which then says nothing about the response."""
        return _state(Path(f"/proc/{self._process.pid}")) == "T"

    def kill(self) -> None:
        """Kill the process and what is below it. Any thread may call it; the owner then sees the end in `ask`."""
        with self._lock:
            if not self._ended:
                # The leader is not reaped yet, so the process group id still is its own.
                below = _below(self._process.pid)
                os.killpg(self._process.pid, signal.SIGKILL)
                for process in below:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()

    def end(self) -> int:
        """Kill, wait until it is gone and return its exit code (negative: the signal's number)."""
        self.kill()
        with self._lock:
            self._ended = True
            code = self._process.wait()
        self._sweep()
        self._drain()
        self._channel.close()
        self._output.close()
        return code

    def printed(self) -> str:
        """The beginning of what it printed."""
        self._drain()
        return self._secrets.hide(self._printed[:_SHOWN_OUTPUT_BYTES].decode(errors="replace").strip())

    def _wait(self, seconds: float, events: int) -> None:
        """Wait for the channel; meanwhile keep the pipe of its output from filling up."""
        poll = select.poll()
        poll.register(self._channel.fileno(), events)
        if self._output_open:
            poll.register(self._output.fileno(), select.POLLIN)
        poll.poll(seconds * 1000 + 1)
        self._drain()

    def _drain(self) -> None:
        """At most a few reads at once, so that a flood of output does not keep us from the deadline."""
        for _ in range(_READS_AT_ONCE if self._output_open else 0):
            try:
                more = os.read(self._output.fileno(), _READ_BYTES)
            except BlockingIOError:
                return
            self._output_open = bool(more)
            if more and not self._printed:
                text = self._secrets.hide(more[:_SHOWN_OUTPUT_BYTES].decode(errors="replace").strip())
                _LOG.warning("a grading process prints: %s", text)
            self._printed += more[: _SHOWN_OUTPUT_BYTES - len(self._printed)]

    def _sweep(self) -> None:
        """End what left our session. Whatever it was forked from, it has our mark in its environment, unless a program
        was started without it; those are found below the process as long as it lives."""
        for _ in range(_SWEEPS):
            left = list(_processes_with(f"{_MARK}={self._mark}".encode()))
            for stop in (signal.SIGSTOP, signal.SIGKILL):  # first still, so that they do not multiply meanwhile
                for pid in left:
                    _signal(pid, stop)
            if not left:
                return


def _environment(ours: Mapping[str, str], variables: Sequence[str]) -> dict[str, str]:
    allowed = {name: value for name, value in ours.items() if any(fnmatch.fnmatchcase(name, one) for one in variables)}
    return {
        **allowed,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **dict.fromkeys(_THREAD_VARIABLES, "1"),
    }


def _below(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except (psutil.Error, OSError):  # it has ended, or this machine has run out of what looking takes
        return []


def _processes_with(variable: bytes) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable in (folder / "environ").read_bytes().split(b"\0") and _state(folder) != "Z":
                yield int(folder.name)
        except OSError:
            continue  # it has ended, or belongs to somebody else


def _state(folder: Path) -> str:
    """The kernel's letter for the state of a process."""
    return (folder / "stat").read_text().rpartition(")")[2].split()[0]


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
