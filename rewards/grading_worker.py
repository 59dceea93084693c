"""A grading process: `python -m rewards.grading_worker FD MEMORY_BYTES`, started and killed by `rewards.grading_pool`.

It reads requests from the connection FD and answers each with a Reward, or with a sentence if the grader
failed.
It ends when the connection closes or its parent dies.
"""

import ctypes
import importlib
import resource
import signal
import sys
from multiprocessing.connection import Connection

from rewards.grader_registry import call
from rlpipe.shared.sample import Reward

READY = "ready"
_PR_SET_PDEATHSIG = 1
_LONGEST_ERROR_CHARACTERS = 500


def main(descriptor: int, memory_bytes: int) -> None:
    """Serve until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Its import takes a second: paid here, in the background, and not within a response's time limit.
    importlib.import_module("rewards.answers.equivalence")
    connection = Connection(descriptor)
    connection.send(READY)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        connection.send(_answer(*request))


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(name: str, response: str, label: str, options: dict, facts: dict) -> Reward | str:
    # Whatever a grader raises costs one sample: it is reported as text, because an exception may not unpickle.
    try:
        return call(name, response, label, options, facts)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:_LONGEST_ERROR_CHARACTERS]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
