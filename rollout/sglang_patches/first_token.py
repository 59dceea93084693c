"""When an engine generated its first token, told by the scheduler through a file.

SGLang itself tells it only with all of its metrics on.
"""

import os
import time
from pathlib import Path

_FILE_VARIABLE = "RLPIPE_FIRST_TOKEN"


class FirstToken:
    """The engine's side: make it before the scheduler processes start."""

    def __init__(self, log_path: Path) -> None:
        self._file = log_path.with_suffix(".first_token")
        self._file.unlink(missing_ok=True)
        self._time: float | None = None
        os.environ[_FILE_VARIABLE] = str(self._file)

    @property
    def time(self) -> float | None:
        """Wall-clock time (of `time.time`); None before the first token."""
        if self._time is None and self._file.exists():
            self._time = self._file.stat().st_mtime
        return self._time


def install_in_scheduler() -> None:
    """Notes the end of the first prefill, which samples the first token, and then takes itself away."""
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

    path = os.environ.get(_FILE_VARIABLE)
    if not path:
        return
    original = SchedulerReqTimeStats.set_prefill_finished_time

    def note(self: SchedulerReqTimeStats, ts: float | None = None) -> None:
        SchedulerReqTimeStats.set_prefill_finished_time = original
        Path(path).write_text(f"{time.time()}\n")
        original(self, ts)

    SchedulerReqTimeStats.set_prefill_finished_time = note
