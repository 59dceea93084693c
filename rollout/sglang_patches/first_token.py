"""When an engine generated its first token, told by the scheduler through a file.

SGLang itself tells it only with all of its metrics on.
"""

import os
from pathlib import Path

from rlpipe.shared.disk_errors import left_out_when_full
from rlpipe.shared.replaced_parts import replaces

replaces(
    "sglang.srt.observability.req_time_stats:SchedulerReqTimeStats.set_prefill_finished_time",
    why="the moment of the first token is told only with all of SGLang's metrics on",
    drop_when="SGLang's answer holds it",
)

_FILE_VARIABLE = "RLPIPE_FIRST_TOKEN"


class FirstToken:
    """The engine's side: make it before the scheduler processes start. Tokens before `begin` do not count."""

    def __init__(self, log_path: Path) -> None:
        self._file = log_path.with_suffix(".first_token")
        self._file.unlink(missing_ok=True)
        self._not_yet = _not_yet(self._file)
        self._not_yet.parent.mkdir(parents=True, exist_ok=True)
        self._not_yet.touch()
        self._time: float | None = None
        os.environ[_FILE_VARIABLE] = str(self._file)

    def begin(self) -> None:
        """The warm-up is over."""
        self._not_yet.unlink(missing_ok=True)

    @property
    def time(self) -> float | None:
        """Wall-clock time (of `time.time`); None before the first token."""
        if self._time is None and self._file.exists():
            self._time = self._file.stat().st_mtime
        return self._time


def _not_yet(file: Path) -> Path:
    """There while the engine warms up."""
    return file.with_suffix(".warming_up")


def install_in_scheduler() -> None:
    """Notes the end of the first prefill, which samples the first token, and then takes itself away."""
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

    path = os.environ.get(_FILE_VARIABLE)
    if not path:
        return
    original = SchedulerReqTimeStats.set_prefill_finished_time

    def note(self: SchedulerReqTimeStats, ts: float | None = None) -> None:
        if not _not_yet(Path(path)).exists():
            SchedulerReqTimeStats.set_prefill_finished_time = original
            with left_out_when_full():
                Path(path).touch()
        original(self, ts)

    SchedulerReqTimeStats.set_prefill_finished_time = note
