"""The file that a worker's stacks go to when a step of it stalls."""

import logging
from collections.abc import Callable
from pathlib import Path

from rlpipe.jit_monitor.events import StepStall
from rlpipe.shared.disk_errors import append_if_room

_log = logging.getLogger(__name__)


def stall_log(worker: str, log_directory: str | Path | None) -> Callable[[StepStall], None]:
    """Appends to `<worker>.stalls.txt`; to this process's log where there is no folder."""

    def write(stall: StepStall) -> None:
        if log_directory is None:
            _log.warning("%s", stall)
            return
        path = Path(log_directory) / f"{worker}.stalls.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        append_if_room(path, f"{stall}\n\n")

    return write
