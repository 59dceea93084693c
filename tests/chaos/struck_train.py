"""`struck_train.py WHERE VICTIM WHICH SIGNAL SECONDS CONFIG [KEY=VALUE]...`: `rlpipe train`, whose victim gets the
signal SECONDS after the first phase `ITERATION:PHASE`, or task of the start with this text, has begun."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

import psutil

from rlpipe.monitoring.console import Console
from rlpipe.training.iteration import IterationRecord

TITLES = {"actor": "ray::_Process", "grader": "rewards.grading_worker", "raylet": "raylet/raylet", "gcs": "gcs_server"}
"""Victims beside the driver, by what stands in the command lines of their processes."""


class Strike:
    """Armed by the first call of `begin` with the right words."""

    def __init__(self, where: str, victim: str, which: int, number: signal.Signals, seconds: float) -> None:
        self._where, self._victim, self._which, self._number = where, victim, which, number
        self._timer = threading.Timer(seconds, self._strike)
        self._timer.daemon = True

    def begin(self, words: str) -> None:
        if words == self._where or (":" not in self._where and self._where in words):
            with contextlib.suppress(RuntimeError):  # it was armed before
                self._timer.start()

    def _strike(self) -> None:
        victims = [psutil.Process()] if self._victim == "driver" else _children(TITLES[self._victim])
        print(f"strike: {self._number.name} for {self._victim} {victims[self._which].pid}", flush=True)
        victims[self._which].send_signal(self._number)


def _children(title: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if title in " ".join(process.cmdline()):
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def watch(strike: Strike) -> None:
    phase, task = IterationRecord.phase, Console.task

    @contextlib.contextmanager
    def watched_phase(record: IterationRecord, name: str) -> Iterator[None]:
        strike.begin(f"{record.number}:{name}")
        with phase(record, name):
            yield

    @contextlib.contextmanager
    def watched_task(console: Console, text: str) -> Iterator[None]:
        strike.begin(text)
        with task(console, text):
            yield

    IterationRecord.phase = watched_phase  # type: ignore[method-assign,assignment]
    Console.task = watched_task  # type: ignore[method-assign,assignment]


def main() -> None:
    where, victim, which, number, seconds, *arguments = sys.argv[1:]
    watch(Strike(where, victim, int(which), signal.Signals[number], float(seconds)))
    sys.argv = ["rlpipe", "train", *arguments]
    from rlpipe.cli import main as command_line

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    command_line()


if __name__ == "__main__":
    main()
