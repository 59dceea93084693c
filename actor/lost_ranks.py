"""Which process of the actor is to blame when a call fails, meets its deadline or stands still. Imports no torch."""

import re
import time
from collections.abc import Sequence

import ray

from rlpipe.shared.ended_processes import ENDED, last_line, why_ended
from rlpipe.shared.errors import ActorLostError, RlpipeError
from rlpipe.shared.remote import WorkerAddress, process_states, stack_of

_SETTLE_SECONDS = 3.0
_POLL_SECONDS = 0.25
# In the traceback of a rank whose exchange failed, or whose device can no longer be used.
_BROKEN = re.compile(r"c10d|ProcessGroup|gloo|NCCL|DistBackendError|AcceleratorError|CUDA error")
# In the stack of a rank that waits for another one.
_WAITING = re.compile(r"exchange_timer\.py|distributed_c10d|p2p_communication|torch/distributed/")


class CallWatch:
    """What `gather` asks about one call to all processes. `workers`: those of them that are known."""

    def __init__(self, workers: Sequence[WorkerAddress], phase: str, every_seconds: float) -> None:
        self.workers = workers
        self._phase = phase
        self._every_seconds = every_seconds
        self._begin = time.monotonic()
        self._next = self._begin + every_seconds
        self._silent: set[WorkerAddress] = set()

    @property
    def is_due(self) -> bool:
        """Whether the next look is one."""
        return time.monotonic() >= self._next

    def look(self) -> None:
        """Raises ActorLostError for a process that is found stopped, or gone, twice in a row: it never answers, or has
        answered, and others wait for it. Of one that owes an answer Ray says sooner that it is gone."""
        if not self.is_due:
            return
        states = process_states(self.workers)
        silent = {worker for worker in self.workers if states.get(worker.name) in ("stopped", "gone")}
        again = [worker for worker in self.workers if worker in silent & self._silent]
        if gone := [worker for worker in again if states[worker.name] == "gone"]:
            raise self._died(gone)
        if again:
            raise ActorLostError(
                f"{self._phase}: {_names(again)} of the actor hangs: its process was stopped by a signal, so it has "
                f"no stack to show; noticed {time.monotonic() - self._begin:.0f} seconds after the call"
            )
        self._silent = silent
        self._next = time.monotonic() + self._every_seconds

    def check_alive(self) -> None:
        """Raises ActorLostError where a process has ended."""
        if gone := self._gone():
            raise self._died(gone)

    def late(self, slow: Sequence[WorkerAddress], seconds: float) -> RlpipeError:
        """The error for a late call: because of those slow ranks that do not wait for others."""
        states = process_states(self.workers)
        stacks = {worker.name: _stack(worker, states) for worker in slow}
        gone = [worker for worker in self.workers if states.get(worker.name) == "gone"]
        culprits = gone or [worker for worker in slow if not _WAITING.search(stacks[worker.name])] or slow
        return ActorLostError(
            f"{self._phase}: no answer within {seconds:g} seconds because of {_names(culprits)}; raise the deadline in "
            "the section `deadlines` if that is too short. Stacks:\n"
            + "\n\n".join(f"--- {worker.name} (pid {worker.pid})\n{stacks[worker.name]}" for worker in slow)
        )

    def failed(self, error: Exception, index: int) -> Exception:
        """The error to raise for what worker `index` answered with, or for what Ray says about it."""
        if isinstance(error, ENDED):
            return self._died(self.workers[index : index + 1], f" ({why_ended(error)})")
        if not isinstance(error, ray.exceptions.RayTaskError):
            return error
        if isinstance(error.cause, RlpipeError):
            return error.cause
        if gone := self._gone():
            return self._died(gone)
        if not _BROKEN.search(str(error)):
            return error
        name = self.workers[index].name
        return ActorLostError(
            f"{self._phase}: an exchange of {name} with the others failed ({last_line(error)}). Its stack:\n{error}"
        )

    def _died(self, gone: Sequence[WorkerAddress], why: str = "") -> ActorLostError:
        return ActorLostError(f"{self._phase}: {_names(gone)} of the actor died{why}{_log(gone)}")

    def _gone(self) -> list[WorkerAddress]:
        """Processes that have ended. A peer notices that before the system says so."""
        end = time.monotonic() + _SETTLE_SECONDS
        while True:
            states = process_states(self.workers)
            gone = [worker for worker in self.workers if states.get(worker.name) == "gone"]
            if gone or time.monotonic() > end:
                return gone
            time.sleep(_POLL_SECONDS)


def _stack(worker: WorkerAddress, states: dict[str, str]) -> str:
    state = states.get(worker.name, "on a node that does not answer")
    return stack_of(worker) if state == "running" else f"no stack: the process is {state}"


def _names(workers: Sequence[WorkerAddress]) -> str:
    return ", ".join(f"{worker.name} (pid {worker.pid})" for worker in workers)


def _log(workers: Sequence[WorkerAddress]) -> str:
    return "; its last words: " + ", ".join(f"worker-*-{worker.pid}.err in Ray's session folder" for worker in workers)
