"""Graders that do what graders must not do."""

import atexit
import ctypes
import os
import pickle
import resource
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

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


def forget_all_modules(response: str, label: str) -> Reward:
    sys.modules.clear()
    return Reward(1.0, True, "")


def leave_a_stray(response: str, label: str) -> Reward:
    """Without our environment, out of our session and of our tree."""
    sleep = "subprocess.Popen(['sleep', '9999'], env={}, start_new_session=True, stdout=subprocess.DEVNULL)"
    program = f"import subprocess; print({sleep}.pid)"
    stray = subprocess.run([sys.executable, "-c", program], env={}, stdout=subprocess.PIPE, check=True).stdout
    with open(response, "wb") as file:
        file.write(stray)
    return Reward(1.0, True, "")


def slow_once(response: str, label: str) -> Reward:
    """`response`: a file that tells whether it is the first time, and who grades."""
    if not os.path.exists(response):
        with open(f"{response}.new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"{response}.new", response)
        time.sleep(1000)
    return Reward(1.0, True, "")


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
    elif response == "limit":
        resource.prlimit(parent, resource.RLIMIT_NOFILE, (3, 3))
    elif response == "trace":  # which stops it, and whoever traces never lets it go on
        if ctypes.CDLL(None).ptrace(16, parent, 0, 0) != 0:
            raise PermissionError
        signal.pause()
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


async def _never_awaited() -> float:
    return 1.0


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


def _spin() -> None:
    while True:
        pass


def _audit(*_: object) -> None:
    raise RuntimeError("no more calls")


def _deaf(_: str) -> None:
    """To all signals there are, and for good."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _limit(kind: int) -> Callable[[str], None]:
    return lambda most: resource.setrlimit(kind, (int(most or 0), resource.getrlimit(kind)[1]))


LEFT_BEHIND: dict[str, Callable[[str], object]] = {
    "no standard output": lambda _: setattr(sys, "stdout", None),
    "a closed standard output": lambda _: sys.stdout.close(),
    "hardly any recursion": lambda _: sys.setrecursionlimit(60),
    "no more files": _limit(resource.RLIMIT_NOFILE),
    "no file of any size": _limit(resource.RLIMIT_FSIZE),
    "no more memory": _limit(resource.RLIMIT_AS),
    "children that leave no exit code": lambda _: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    "no signals": _deaf,
    "threads without end": lambda _: [threading.Thread(target=_spin, daemon=index < 20).start() for index in range(40)],
    "a hook in all calls": lambda _: sys.addaudithook(_audit),
    "another folder that is gone": lambda where: (os.mkdir(where), os.chdir(where), os.rmdir(where)),
}


def leave_behind(response: str, label: str) -> float:
    """`response`: what; `label`: an argument of it."""
    LEFT_BEHIND[response](label)
    return 1.0


def use_everything(response: str, label: str) -> float:
    """What an honest grader may do: print, call itself, open a file, run a program and believe its exit code."""
    print(response)
    with tempfile.TemporaryFile() as file:
        file.write(b"x" * 2**16)
    depth = (lambda function, left: function(function, left))(
        lambda again, left: left and 1 + again(again, left - 1), 200
    )
    bytearray(2**24)
    code = subprocess.run([sys.executable, "-S", "-c", "raise SystemExit(3)"]).returncode
    return float(depth == 200 and code == 3)


ODD_ANSWERS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "text": lambda: "1.0",
    "bytes": lambda: b"1.0",
    "a list": lambda: [1.0],
    "a complex number": lambda: 1j,
    "a whole number beyond floats": lambda: 10**400,
    "not a number": lambda: float("nan"),
    "a generator": lambda: (one for one in [1.0]),
    "a coroutine": _never_awaited,
    "a class": lambda: Reward,
    "a reward of text": lambda: Reward("1", None, ""),  # type: ignore[arg-type]
    "components of text": lambda: Reward(1.0, None, "", {"x": "y"}),  # type: ignore[dict-item]
    "components that are a list": lambda: Reward(1.0, None, "", [1.0]),  # type: ignore[arg-type]
    "half a character": lambda: Reward(1.0, None, "\ud800"),
}


def answer_oddly(response: str, label: str) -> object:
    return ODD_ANSWERS[response]()


RAISED = {
    "interrupt": KeyboardInterrupt,
    "generator's end": GeneratorExit,
    "stop": StopIteration,
    "group": BaseExceptionGroup("many", [KeyboardInterrupt()]),
    "async": StopAsyncIteration,
    "bare": BaseException("bare"),
}


def raise_oddly(response: str, label: str) -> float:
    raise RAISED[response]


_kept: list[int] = []
