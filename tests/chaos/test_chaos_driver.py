"""Drivers that are killed at random moments, from the first import to the last row, are resumed with the same bits."""

import random
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from tests.chaos.layouts import LAYOUTS, arguments_of, assert_same
from tests.rlpipe.run_support import (
    assert_no_process_is_left,
    metric_rows,
    run_command,
    start_command,
)

KILLS = 20
SECONDS = 300


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Of each layout the folder of a whole run, and how many seconds it took."""
    found = {}
    for layout in LAYOUTS:
        folder = tmp_path_factory.mktemp("undisturbed")
        begin = time.monotonic()
        run_command("train", *arguments_of(layout, folder))
        found[layout] = folder / "small", time.monotonic() - begin
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kill", range(KILLS))
def test_a_killed_driver_is_resumed(undisturbed, tmp_path, kill):
    numbers = random.Random(kill)
    layout = list(LAYOUTS)[kill % len(LAYOUTS)]
    whole, seconds = undisturbed[layout]
    number = numbers.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    output, code, rows = killed_run(tmp_path, layout, number, numbers.uniform(0.5, seconds))
    if number is not signal.SIGKILL and rows and code == 130:
        assert "continue with --resume" in output, output
    run_command("train", *arguments_of(layout, tmp_path), "--requeued")
    assert_same(whole, tmp_path / "small")


def killed_run(folder: Path, layout: str, number: signal.Signals, seconds: float) -> tuple[str, int, int]:
    """What it said, its exit code and how many rows it left."""
    mark = uuid.uuid4().hex
    process = start_command("train", *arguments_of(layout, folder), mark=mark)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(number)
    output, _ = process.communicate(timeout=SECONDS)
    assert_no_process_is_left(mark)
    assert "Traceback" not in output, output
    return output, process.returncode, len(metric_rows(folder / "small")) if _has_rows(folder) else 0


def _has_rows(folder: Path) -> bool:
    return (folder / "small/metrics.jsonl").exists()
