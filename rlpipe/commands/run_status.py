"""How a run stands, told from its folder alone."""

import json
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from rlpipe.config.strict_yaml import load_yaml
from rlpipe.monitoring.durations import duration_text
from rlpipe.monitoring.json_lines import read_json_lines
from rlpipe.monitoring.report.series import held_out, label
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.monitoring.run_lock import lock_path
from rlpipe.shared.checkpoint_folder import latest_checkpoint
from rlpipe.shared.errors import DataError

_STEPS_OF_ESTIMATE = 10
_CLOCK_ERROR_SECONDS = 2.0


def run_status(folder: Path) -> str:
    """A few lines. Raises DataError where there is no run."""
    directory = RunDirectory(folder)
    if not directory.config.is_file():
        raise DataError(f"{folder}: no run here (config.yaml is missing); give the folder of a run")
    facts = list(_facts(directory))
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in facts)


def _facts(directory: RunDirectory) -> Iterator[tuple[str, str]]:
    found = read_json_lines(directory.metrics)
    rows = [row for row in found.rows if isinstance(row.get("iteration"), int)]
    iterations = _iterations(directory)
    done = max((row["iteration"] for row in rows), default=None)
    owner = lock_owner(directory.path)
    yield "run", str(directory.path)
    if owner is not None:
        yield "state", f"running: process {owner['pid']} on {owner['host']} since {owner['since']}"
    elif done is not None and done == iterations:
        yield "state", "finished"
    else:
        yield "state", "not running; continue it with rlpipe train CONFIG --resume"
    if done is None:
        yield "iteration", f"none of {iterations} yet"
    else:
        age = duration_text(max(0.0, time.time() - directory.metrics.stat().st_mtime))
        yield "iteration", f"{done} of {iterations}, {age} ago"
        yield from _progress(rows, iterations - done, running=owner is not None)
    checkpoint = latest_checkpoint(directory.checkpoints)
    yield "checkpoint", "none" if checkpoint is None else str(checkpoint)
    faults = read_json_lines(directory.logs / "faults.jsonl").rows
    if faults:
        yield "faults", f"{len(faults)}, see {directory.logs / 'faults.jsonl'}"
    if found.damaged:
        yield "damaged", f"{found.damaged} lines of {directory.metrics}"
    yield "logs", str(directory.logs)


def _progress(rows: list[dict[str, Any]], left: int, running: bool) -> Iterator[tuple[str, str]]:
    steps = [
        row["time/step_seconds"] for row in rows if row["iteration"] and isinstance(row.get("time/step_seconds"), float)
    ]
    if steps:
        step = median(steps[-_STEPS_OF_ESTIMATE:])
        rest = f", about {duration_text(step * left)} left" if left and running else ""
        yield "step", f"{duration_text(step) if step >= 10 else f'{step:.2f} s'}{rest}"
    names = dict.fromkeys(name for row in rows for name in row)
    for name in (*held_out(names), "rollout/reward_mean", "train/loss"):
        values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        if values:
            yield label(name), f"{values[0]:.4g} → {values[-1]:.4g}"
    skipped = rows[-1].get("train/updates_skipped_count")
    if isinstance(skipped, int | float) and skipped:
        yield "skipped", f"{skipped:.0f} updates, for values that were not finite"


def _iterations(directory: RunDirectory) -> int:
    try:
        return int(load_yaml(directory.config.read_text())["run"]["iterations"])
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{directory.config}: run.iterations cannot be read; restore the run's configuration") from None


def lock_owner(folder: Path, here: bool = False) -> dict[str, Any] | None:
    """Who holds the run's lock, `here`: if that is a process of this host. The file of a process that was killed stays,
    so on this host the process counts.
    """
    try:
        owner = json.loads(lock_path(folder.resolve()).read_bytes())
        since = datetime.fromisoformat(owner["since"]).timestamp()
        if owner["host"] != socket.gethostname():
            return None if here else dict(owner)
        started = psutil.Process(owner["pid"]).create_time()
    except (OSError, ValueError, KeyError, TypeError, psutil.NoSuchProcess):
        return None
    return dict(owner) if started <= since + _CLOCK_ERROR_SECONDS else None
