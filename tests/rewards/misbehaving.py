"""Graders that do what graders must not do."""

import os
import signal
import subprocess
import sys
import time

from rlpipe.shared.sample import Reward


def hang(response: str, label: str) -> Reward:
    while True:
        pass


def hang_holding_the_lock(response: str, label: str) -> Reward:
    """One C call that does not let go of the interpreter: no signal handler of Python would run."""
    return Reward(float(len(str(3**10**8))), None, "")


def sleep_deaf(response: str, label: str) -> Reward:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
    return Reward(0.0, None, "")


def crash(response: str, label: str) -> Reward:
    os.kill(os.getpid(), signal.SIGSEGV)
    return Reward(0.0, None, "")


def leave(response: str, label: str) -> Reward:
    os._exit(3)


def eat_memory(response: str, label: str) -> Reward:
    return Reward(float(len(b"x" * 10**11)), None, "")


def recurse(response: str, label: str) -> Reward:
    return recurse(response, label)


def raise_what_does_not_pickle(response: str, label: str) -> Reward:
    class Local(Exception):
        pass

    raise Local(lambda: None)


def quit_quietly(response: str, label: str) -> Reward:
    sys.exit(0)


def leave_a_child(response: str, label: str) -> Reward:
    child = subprocess.Popen(["sleep", "1000"])
    with open(response, "w") as file:
        file.write(str(child.pid))
    time.sleep(1000)
    return Reward(0.0, None, "")


def echo(response: str, label: str, response_tokens: int = -1) -> Reward:
    return Reward(float(label), None, f"{len(response)} characters, {response_tokens} tokens")


def plain_number(response: str, label: str) -> float:
    return 0.25


def without_label(response: str) -> Reward:
    return Reward(0.0, None, response)
