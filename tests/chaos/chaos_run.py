"""A training run that is disturbed on schedule: `chaos_run.py SCHEDULE.json RECORD.jsonl CONFIG [KEY=VALUE]...`.

The schedule is a list of strikes (chaos_schedule.py). A strike is armed when its phase begins in its iteration, and
ends or stops processes of the run a moment later. The record gets a row for every strike, every started engine and
every batch that is trained.
"""

import contextlib
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
import typer

from rlpipe.commands.environment import set_defaults
from rlpipe.config.load import load_config
from rlpipe.monitoring.json_lines import append_json_line
from rlpipe.shared import interrupts
from rlpipe.training.iteration import IterationRecord
from rlpipe.training.learner import Learner
from rollout.pool import RolloutPool
from tests.chaos.chaos_schedule import SIGNALS, TITLES, Strike
from tests.rlpipe.run_support import MARK, marked_processes


class Chaos:
    """Wraps what the driver does, and strikes when it is due."""

    def __init__(self, strikes: list[Strike], record: Path) -> None:
        self._strikes, self._record = strikes, record
        self._iteration = 0
        self._watch_phases()
        self._watch_calls(RolloutPool, "sleep")
        self._watch_calls(RolloutPool, "wake")
        self._note_results()

    def begin(self, phase: str) -> None:
        """A phase begins, or a call that stands for one."""
        for strike in [one for one in self._strikes if (one.iteration, one.phase) == (self._iteration, phase)]:
            self._strikes.remove(strike)
            threading.Timer(strike.delay_seconds, self._strike, (strike,)).start()

    def _strike(self, strike: Strike) -> None:
        for process in _victims(strike):
            with contextlib.suppress(psutil.NoSuchProcess):
                row = {"strike": strike.name, "pid": process.pid, "time": time.time()}
                process.send_signal(SIGNALS[strike.how])
                append_json_line(self._record, row)

    def _watch_phases(self) -> None:
        phase = IterationRecord.phase

        @contextlib.contextmanager
        def watched(record: IterationRecord, name: str) -> Iterator[None]:
            self._iteration = record.number
            self.begin(name)
            with phase(record, name):
                yield

        IterationRecord.phase = watched  # type: ignore[method-assign,assignment]

    def _watch_calls(self, owner: type, method: str) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def watched(*arguments: Any, **keywords: Any) -> Any:
            self.begin(method)
            return original(*arguments, **keywords)

        setattr(owner, method, watched)

    def _note_results(self) -> None:
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


def _victims(strike: Strike) -> list[psutil.Process]:
    """In the order of their process ids; `strike.which` of them, or all."""
    found = []
    for process in marked_processes(os.environ[MARK]):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(title in " ".join([process.name(), *process.cmdline()]) for title in TITLES[strike.victim]):
                found.append(process)
    found.sort(key=lambda process: process.pid)
    return found if strike.which is None else found[strike.which : strike.which + 1]


def main() -> None:
    schedule, record, config, *overrides = sys.argv[1:]
    set_defaults()
    interrupts.install()
    Chaos([Strike(**row) for row in json.loads(Path(schedule).read_text())], Path(record))
    from rlpipe.cli import one_sentence
    from rlpipe.training.train import train

    try:
        with one_sentence(debug=False):
            train(load_config(config, overrides))
    except typer.Exit as end:
        raise SystemExit(end.exit_code) from None


if __name__ == "__main__":
    main()
