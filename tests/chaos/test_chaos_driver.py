"""Drivers that are killed at random moments, from the first import to the last row, are resumed with the same bits."""

import random
import signal
import subprocess
import uuid
from pathlib import Path

import pytest

from tests.chaos.chaos_support import LAYOUTS, assert_resumed, chaos_arguments
from tests.rlpipe.run_support import assert_no_process_is_left, metric_rows, start_command

KILLS = 20
SECONDS = 300


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kill", range(KILLS))
def test_a_killed_driver_is_resumed(undisturbed, tmp_path, kill):
    numbers = random.Random(kill)
    layout = LAYOUTS[list(LAYOUTS)[kill % len(LAYOUTS)]]
    whole = undisturbed(*layout)
    number = numbers.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    output, code, rows = killed_run(tmp_path, layout, number, numbers.uniform(0.5, whole.seconds))
    if number is not signal.SIGKILL and rows and code == 130:
        assert "continue with --resume" in output, output
    assert_resumed(tmp_path, whole, *layout)


def killed_run(folder: Path, layout: tuple[str, ...], number: signal.Signals, seconds: float) -> tuple[str, int, int]:
    """What it said, its exit code and how many rows it left."""
    mark = uuid.uuid4().hex
    process = start_command("train", *chaos_arguments(folder, *layout), mark=mark)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(number)
    output, _ = process.communicate(timeout=SECONDS)
    assert_no_process_is_left(mark)
    assert "Traceback" not in output, output
    rows = metric_rows(folder / "small") if (folder / "small/metrics.jsonl").exists() else []
    return output, process.returncode, len(rows)
