"""Whether the runs that this machine holds still move: what a container's health check asks."""

import time
from collections.abc import Iterator
from pathlib import Path

from rlpipe.commands.run_status import lock_owner
from rlpipe.monitoring.durations import duration_text
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.monitoring.run_lock import lock_path
from rlpipe.shared.errors import ConfigError, ResourceError


def check_health(runs: Path, silent_seconds: float) -> str:
    """A line about each run below `runs` that goes on here; the folder need not be there yet.

    Raises ResourceError when one of them has written nothing, neither rows nor logs nor checkpoints, for
    `silent_seconds`, and ConfigError for what is no folder.
    """
    if runs.exists() and not runs.is_dir():
        raise ConfigError(f"{runs} is no folder; give the one that holds the runs, as run.directory")
    found = [(folder, time.time() - _last_written(folder)) for folder in _held_here(runs)]
    silent = [f"{folder} has written nothing for {duration_text(age)}" for folder, age in found if age > silent_seconds]
    if silent:
        raise ResourceError(f"{'; '.join(silent)}: look at `rlpipe logs RUN`, and stop it with SIGTERM")
    return "\n".join(f"{folder}: wrote {duration_text(age)} ago" for folder, age in found) or "no run goes on here"


def _held_here(runs: Path) -> Iterator[Path]:
    for lock in sorted(runs.glob(".*.lock")):
        folder = runs / lock.name.removeprefix(".").removesuffix(".lock")
        if lock_owner(folder, here=True) is not None:
            yield folder


def _last_written(folder: Path) -> float:
    """Seconds since the epoch; of a run that has just begun, when it took its lock."""
    directory = RunDirectory(folder)
    written = [directory.metrics, directory.samples, directory.checkpoints, *directory.logs.glob("*")]
    times = [path.stat().st_mtime for path in written if path.exists()]
    return max(times, default=lock_path(folder).stat().st_mtime)
