"""One grading process as its owner sees it: start it, ask it, end it with everything it started."""

import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Pipe

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerProcess:
    """A running `rewards.grading_worker` in a session of its own, so that one signal ends it and its children.

    It is a fresh interpreter and not a fork: the caller has threads and possibly a CUDA context. `ask` belongs to one
    thread, which also calls `end`, once.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._connection, theirs = Pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rewards.grading_worker", str(theirs.fileno()), str(memory_bytes)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
        self._lock = threading.Lock()
        self._ended = False

    def receive(self, timeout_seconds: float) -> object:
        """The next message. Raises TimeoutError if there is none in time, EOFError or OSError if the process died."""
        if not self._connection.poll(timeout_seconds):
            raise TimeoutError
        return self._connection.recv()

    def ask(self, message: bytes, timeout_seconds: float) -> object:
        """Send a pickled request and receive its answer; raises like `receive`."""
        self._connection.send_bytes(message)
        return self.receive(timeout_seconds)

    def kill(self) -> None:
        """Kill the process and all its children. Any thread may call it; the owner then sees the end in `receive`."""
        with self._lock:
            if not self._ended:
                # The leader is not reaped yet, so the process group id still is its own.
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill, wait until it is gone and return its exit code (negative: the signal's number)."""
        self.kill()
        with self._lock:
            self._ended = True
            self._connection.close()
            return self._process.wait()
