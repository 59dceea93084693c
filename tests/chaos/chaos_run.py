"""`chaos_run.py SCHEDULE.json RECORD.jsonl CONFIG [ARGUMENT]...`: `rlpipe train`, disturbed on schedule.

The schedule is a list of strikes (chaos_schedule.py). A strike is armed when its phase, or task of the start, begins,
and ends or stops processes of the run a moment later. The record gets a row for every strike, every started engine and
every batch that is trained.
"""

import contextlib
import errno
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from rlpipe.monitoring.console import Console
from rlpipe.monitoring.json_lines import append_json_line
from rlpipe.training.iteration import IterationRecord
from tests.chaos.chaos_schedule import DISK, FILLER, SIGNALS, TITLES, Strike
from tests.rlpipe.run_support import MARK, marked_processes


class Chaos:
    """Wraps what the driver does, and strikes when it is due."""

    def __init__(self, strikes: list[Strike], record: Path, folder: Path) -> None:
        from rollout.pool import RolloutPool
        from rollout.weights.engine_groups import EngineWeightGroups

        self._strikes, self._record, self._folder = strikes, record, folder
        self._iteration: int | None = None
        self._due: list[threading.Timer] = []
        self._watch_phases()
        self._watch_tasks()
        self._watch_calls(RolloutPool, "sleep")
        self._watch_calls(RolloutPool, "wake")
        self._watch_calls(EngineWeightGroups, "join", after_strikes=True)
        self._note_results()

    def begin(self, iteration: int | None, words: str) -> None:
        """A phase begins, a task of the start, or a call that stands for a phase. Of several strikes that are due, the
        first is made now, and the next where the phase begins again: a process is lost once. Of an iteration, a strike
        is made before the next phase begins: on a busy machine that one's could otherwise end the process first."""
        while self._due:
            self._due.pop().join()
        for strike in [one for one in self._strikes if one.is_due(iteration, words)][:1]:
            self._strikes.remove(strike)
            timer = threading.Timer(strike.delay_seconds, self._strike, (strike,))
            timer.daemon = True
            timer.start()
            if strike.iteration is not None:
                self._due.append(timer)

    def _strike(self, strike: Strike) -> None:
        if strike.victim == DISK:
            append_json_line(self._record, {"strike": strike.name, "time": time.time()})
            _fill(self._folder / FILLER)
            return
        if strike.iteration is None and not _victims(strike):  # of the start; they are there in a moment
            end = time.monotonic() + 120
            while not _victims(strike) and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(strike.delay_seconds)
        victims = _victims(strike)
        if not victims:  # lost to the strike before; they are there again where the phase begins again
            self._strikes.append(strike)
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.status()
                append_json_line(self._record, {"strike": strike.name, "pid": process.pid, "time": time.time()})
                process.send_signal(SIGNALS[strike.how])

    def _watch_phases(self) -> None:
        phase = IterationRecord.phase

        @contextlib.contextmanager
        def watched(record: IterationRecord, name: str) -> Iterator[None]:
            self._iteration = record.number
            self.begin(record.number, name)
            with phase(record, name):
                yield

        IterationRecord.phase = watched  # type: ignore[method-assign,assignment]

    def _watch_tasks(self) -> None:
        task = Console.task

        @contextlib.contextmanager
        def watched(console: Console, text: str) -> Iterator[None]:
            self.begin(None, text)
            with task(console, text):
                yield

        Console.task = watched  # type: ignore[method-assign,assignment]

    def _watch_calls(self, owner: type, method: str, after_strikes: bool = False) -> None:
        """after_strikes: the call is made when the strikes that are due have been made; it takes milliseconds."""
        original = getattr(owner, method)

        @functools.wraps(original)
        def watched(*arguments: Any, **keywords: Any) -> Any:
            self.begin(self._iteration, method)
            while after_strikes and self._due:
                self._due.pop().join()
            return original(*arguments, **keywords)

        setattr(owner, method, watched)

    def _note_results(self) -> None:
        from rlpipe.training.learner import Learner
        from rollout.pool import RolloutPool

        launch, pack = RolloutPool.launch, Learner.pack

        def noted_launch(pool: RolloutPool, setup: Any) -> Any:
            append_json_line(self._record, {"engine": setup.index, "instance": setup.instance})
            return launch(pool, setup)

        def noted_pack(learner: Learner, samples: Any, *others: Any) -> Any:
            ids = [sample.sample_id for sample in samples]
            append_json_line(self._record, {"trained_in": self._iteration, "samples": ids})
            return pack(learner, samples, *others)

        RolloutPool.launch = noted_launch  # type: ignore[method-assign]
        Learner.pack = noted_pack  # type: ignore[method-assign]


def _fill(path: Path) -> None:
    """Takes all room of the file system that `path` lies on."""
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(2**16))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return


def _victims(strike: Strike) -> list[psutil.Process]:
    """In the order of their process ids; `strike.which` of them, or all."""
    if strike.victim == "driver":
        return [psutil.Process()]
    found = []
    for process in marked_processes(os.environ[MARK]):
        with contextlib.suppress(psutil.NoSuchProcess):
            if TITLES[strike.victim] in " ".join([process.name(), *process.cmdline()]):
                found.append(process)
    found.sort(key=lambda process: process.pid)
    return found if strike.which is None else found[strike.which :][:1]


def main() -> None:
    schedule, record, *arguments = sys.argv[1:]
    from rlpipe.cli import main as command_line
    from rlpipe.commands.environment import set_defaults

    set_defaults()
    Chaos([Strike(**row) for row in json.loads(Path(schedule).read_text())], Path(record), Path(schedule).parent)
    sys.argv = ["rlpipe", "train", *arguments]
    command_line()


if __name__ == "__main__":
    main()
