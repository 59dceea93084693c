"""A run of `rlpipe train` or `rlpipe sft` and its metrics, for benchmarks that compare whole runs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
_POLL_SECONDS = 0.2
_END_SECONDS = 40.0


def train(
    config: str,
    folder: Path,
    name: str,
    settings: list[str],
    command: str = "train",
    environment: Mapping[str, str] | None = None,
    on_row: Callable[[dict[str, float]], None] = lambda row: None,
) -> list[dict[str, float]]:
    """Metrics by iteration of the run `name`, whose folder lies in `folder`; what it prints goes to standard error.

    command: of rlpipe, `train` or `sft`. environment: variables that the run has besides those of this process.
    on_row: called with an iteration's when it has ended, so that a benchmark that is cut off has told the first ones.

    Raises CalledProcessError when the run fails.
    """
    # At a benchmark's limit there is nobody to go on from a checkpoint, which may fill a disk.
    places = [f"run.directory={folder}", f"run.name={name}", "fault.grace_seconds=0"]
    arguments = [sys.executable, "-m", "rlpipe", command, config, *places, *settings]
    variables = {**os.environ, **(environment or {})}
    metrics, read = folder / name / "metrics.jsonl", 0
    rows: list[dict[str, float]] = []
    process = subprocess.Popen(arguments, cwd=PROJECT, stdout=sys.stderr, env=variables)
    try:
        ended = False
        while not ended:
            ended = process.poll() is not None  # before the file is read: what was written last is read once more
            lines, read = _whole_lines(metrics, read)
            for line in lines:
                rows.append(json.loads(line))
                on_row(rows[-1])
            time.sleep(0.0 if lines or ended else _POLL_SECONDS)
    finally:
        process.terminate()  # as Ctrl-C ends it
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments)
    return rows


def _whole_lines(file: Path, start: int) -> tuple[list[str], int]:
    """Those from byte `start` on that have their end, and the byte after them."""
    if not file.exists():
        return [], start
    with file.open("rb") as opened:
        opened.seek(start)
        text, end, _ = opened.read().rpartition(b"\n")
    return text.decode().splitlines(), start + len(text) + len(end)
