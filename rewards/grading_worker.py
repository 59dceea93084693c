"""A grading process: `python -m rewards.grading_worker FD MEMORY_BYTES`, started and killed by `rewards.grading_pool`.

It reads requests from the connection FD and answers each, under its number, with a Reward, or with a sentence if the
grader failed. It ends when the connection closes or its parent dies.
"""

import ctypes
import importlib
import os
import pickle
import resource
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any

from rewards.grader_registry import call
from rewards.grading_channel import WorkerChannel, reward_to_json
from rewards.sandbox.inside.confine import forbid_reach
from rlpipe.shared.descendants import adopt_orphans

_PR_SET_PDEATHSIG = 1
_LONGEST_ERROR_CHARACTERS = 500
_MOST_LEFT_OPEN = 32
_LIMITS = (
    resource.RLIMIT_AS,
    resource.RLIMIT_CPU,
    resource.RLIMIT_DATA,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_STACK,
)


def main(descriptor: int, memory_bytes: int) -> None:
    """Serve until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    adopt_orphans()  # so that the owner finds whatever a grader leaves behind
    if sys.platform == "linux":
        forbid_reach(os.getppid(), os.getpgid(os.getppid()))  # the run's own process
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Its import takes a second: paid here, in the background, and not within a response's time limit.
    importlib.import_module("rewards.answers.equivalence")
    process, channel = os.getpid(), WorkerChannel(descriptor)
    fresh = _state()
    channel.send({"ready": True})
    while (body := channel.receive()) is not None:
        number, request = pickle.loads(body)  # nosec B301
        answer = _answer(*request)
        if os.getpid() != process:
            os._exit(0)  # a grader forked, and this is the copy: the answer is the other one's
        channel.send({"id": number, "worn": _is_worn(fresh), **answer})


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(name: str, response: str, label: str, options: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    # Whatever a grader raises costs one sample: it is reported as text, because an exception may not unpickle.
    try:
        return {"reward": reward_to_json(call(name, response, label, options, facts))}
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {_text(error)}"[:_LONGEST_ERROR_CHARACTERS]}


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(an exception without text)"


@dataclass(frozen=True)
class _State:
    """What a grader may leave behind for the next response. Libraries change none of it on their own account, except
    that they open files and start a few threads."""

    descriptors: int
    threads: int
    recursion: int
    limits: tuple[int, ...]
    rest: tuple[Any, ...]


def _state() -> _State:
    streams = tuple(stream is None or stream.closed for stream in (sys.stdout, sys.stderr))
    return _State(
        len(os.listdir("/dev/fd")),
        threading.active_count(),
        sys.getrecursionlimit(),
        tuple(_unbounded(resource.getrlimit(kind)[0]) for kind in _LIMITS),
        (os.getcwd(), streams, signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGCHLD)),
    )


def _unbounded(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _is_worn(fresh: _State) -> bool:
    """Whether so much was left behind that the next response should get a fresh process."""
    try:
        now = _state()
    except Exception:
        return True
    return (
        now.descriptors > fresh.descriptors + _MOST_LEFT_OPEN
        or now.threads > fresh.threads + _MOST_LEFT_OPEN
        or now.recursion < fresh.recursion
        or any(left < had for left, had in zip(now.limits, fresh.limits, strict=True))
        or now.rest != fresh.rest
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
