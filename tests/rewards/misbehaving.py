"""Graders that do what graders must not do."""

import atexit
import os
import pickle
import signal
import stat
import struct
import subprocess
import sys
import threading
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


def fork_and_return(response: str, label: str) -> float:
    """Both processes come back with an answer."""
    os.fork()
    return float(label)


def write_to_every_descriptor(response: str, label: str) -> float:
    """`response`: what is written, once to every descriptor that is open."""
    for descriptor in range(1, 256):
        try:
            os.write(descriptor, response.encode("latin-1"))
        except OSError:
            continue
    return 1.0


def flood(response: str, label: str) -> float:
    """Standard output, or the connection."""
    wanted = stat.S_ISFIFO if label == "output" else stat.S_ISSOCK
    flooded = next(
        int(one) for one in sorted(os.listdir("/proc/self/fd")) if wanted(os.stat(f"/proc/self/fd/{one}").st_mode)
    )
    while True:
        os.write(flooded, b"x" * 2**16)


def flood_output_and_answer(response: str, label: str) -> float:
    for _ in range(160):
        os.write(1, b"x" * 2**16)
    return 1.0


def close_everything(response: str, label: str) -> float:
    os.closerange(0, 1000)
    return 1.0


def stop_itself(response: str, label: str) -> float:
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


def leave_a_thread_that_kills(response: str, label: str) -> float:
    threading.Timer(float(response), os._exit, (9,)).start()
    return 1.0


def leave_an_alarm(response: str, label: str) -> float:
    signal.setitimer(signal.ITIMER_REAL, float(response))
    return 1.0


def leak_descriptors(response: str, label: str) -> float:
    _kept.extend(os.dup(0) for _ in range(200))
    return 1.0


def slow_echo(response: str, label: str) -> float:
    time.sleep(float(response))
    return float(label)


def folder(response: str, label: str) -> Reward:
    return Reward(1.0, None, os.getcwd())


def stop_soon(response: str, label: str) -> float:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    return 1.0


def change_folder(response: str, label: str) -> float:
    os.chdir("/")
    return 1.0


def fork_bomb(response: str, label: str) -> float:
    """Of processes that leave the session; `response`: their number, so that the machine lives."""
    for _ in range(int(response)):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(0)
    time.sleep(1000)
    return 1.0


def kill_the_run(response: str, label: str) -> Reward:
    """`response`: how."""
    parent = os.getppid()
    if response == "child":
        if child := os.fork():
            os.waitpid(child, 0)
        else:
            try:
                os.kill(int(label), signal.SIGKILL)
            finally:
                os._exit(0)
    elif response == "group":
        os.killpg(os.getpgid(parent), signal.SIGKILL)
    elif response == "handle":
        signal.pidfd_send_signal(os.pidfd_open(parent), signal.SIGKILL)
    else:
        os.kill(parent, signal.SIGSTOP)
    return Reward(1.0, None, "")


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


def pickle_bomb(response: str, label: str) -> Reward:
    """Beside the answer, a pickle in every descriptor; in the answer, one where plain text belongs."""
    bomb = Bomb(response)
    body = pickle.dumps(bomb)
    for descriptor in range(3, 256):
        try:
            os.write(descriptor, struct.pack("!i", len(body)) + body)
        except OSError:
            continue
    return Reward(1.0, True, bomb, {"x": 1.0})  # type: ignore[arg-type]


def giant_reason(response: str, label: str) -> Reward:
    return Reward(1.0, True, "r" * 10**8, {})


def giant_components(response: str, label: str) -> Reward:
    return Reward(1.0, True, "", {str(i): 0.0 for i in range(10**6)})


def hooks_at_exit(response: str, label: str) -> float:
    atexit.register(time.sleep, 1000)
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return 1.0


def environment(response: str, label: str) -> Reward:
    return Reward(1.0, None, repr(sorted(os.environ.items())))


class Reviving:
    """Equal to everything, and neither text nor number."""

    def __float__(self) -> float:
        return float("nan")

    def __str__(self) -> str:
        raise RuntimeError("no text")


def odd_reward(response: str, label: str) -> Reward:
    return Reward(Reviving(), Reviving(), Reviving(), {})  # type: ignore[arg-type]


def raise_without_text(response: str, label: str) -> Reward:
    class Silent(Exception):
        __str__ = None  # type: ignore[assignment]

    raise Silent


_kept: list[int] = []
