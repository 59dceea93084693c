"""The console: as wide as the terminal, nothing said twice, progress in tokens, time left."""

import io

import pytest
from rich.console import Console as RichConsole

from rlpipe.monitoring.console import Console, TaskProgress
from rlpipe.monitoring.durations import duration_text
from rlpipe.monitoring.iteration_table import IterationTable
from rlpipe.monitoring.report.series import held_out

_ROW = {
    "rollout/reward_mean": 0.5,
    "rollout/accuracy": 0.25,
    "train/loss": 0.125,
    "time/rollout_seconds": 4.0,
    "time/step_seconds": 6.0,
    "perf/rollout_tokens_per_second": 12345.0,
}


def _console(terminal, width=80):
    console, written = Console(10), io.StringIO()
    console._rich = RichConsole(
        file=written, force_terminal=terminal, width=width, highlight=False, soft_wrap=True, color_system=None
    )
    return console, written


@pytest.mark.parametrize("width", [24, 40, 60, 80, 200])
def test_rows_fit_the_width_and_keep_what_is_read_most(width):
    header, row = IterationTable(10).lines(1, _ROW, width)
    assert header is not None and len(header) == len(row) <= width
    assert "reward" in header
    assert ("rollout tok/s" in header) == (width >= 85)
    assert ("left" in header) == (width >= 40)


def test_a_header_returns_when_a_column_comes_and_none_is_there_for_what_is_never_measured():
    table = IterationTable(10)
    header, _ = table.lines(1, _ROW, None)
    assert header is not None and "held-out" not in header and "mean gap" not in header
    assert table.lines(2, _ROW, None)[0] is None
    header, row = table.lines(3, {**_ROW, "eval/x/accuracy": 0.75}, None)
    assert header is not None and "held-out" in header and "75.0%" in row
    assert row.endswith("42 s")  # seven steps of six seconds


def test_a_loss_of_rounding_alone_has_no_sign():
    header, row = IterationTable(10).lines(1, {"train/loss": -1.3e-8}, None)
    assert header is not None and len(header) == len(row)
    assert row.split()[1] == "0.0000"
    assert IterationTable(10).lines(1, {"train/loss": -0.125}, None)[1].split()[1] == "-0.1250"


def test_progress_tells_tokens_speed_and_time_left():
    console, written = _console(terminal=True, width=160)
    with console.phase(3, "rollout"):
        console._task_start_seconds -= 10
        console.progress(TaskProgress(0, 100))
        console.progress(TaskProgress(25, 100, tokens=5000, longest_tokens=321))
        text = console._progress_text(TaskProgress(25, 100, tokens=5000, longest_tokens=321))
    assert text.startswith("iteration 3/10  rollout  25/100 · 5,000 tokens · ")
    assert "longest 321 · about 30 s left" in text
    assert "tok/s" in text
    narrow = console._progress_text(TaskProgress(25, 100, tokens=5000, longest_tokens=321), 75, " (run)")
    assert "longest" not in narrow and "tok/s" in narrow and narrow.endswith("left (run)") and len(narrow) <= 75
    with console.phase(3, "rollout"):
        pass  # entered again, for a moment
    with console.phase(4, "rollout"):
        assert "about 10 s left" in console._progress_text(TaskProgress(0, 100))


def test_a_log_file_gets_no_line_twice():
    console, written = _console(terminal=False)
    with console.phase(1, "rollout"):
        for progress in (TaskProgress(0, 8), TaskProgress(0, 8), TaskProgress(0, 8, 99, 50)):
            console._said_seconds -= 60
            console.progress(progress)
    lines = written.getvalue().splitlines()
    assert len(lines) == 2 and "99 tokens" in lines[1]


@pytest.mark.parametrize(
    ("seconds", "text"), [(7.6, "8 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (356400, "4 d 03 h")]
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_held_out_is_the_reward_where_there_is_no_accuracy():
    table = IterationTable(10)
    header, row = table.lines(1, {**_ROW, "eval/x/reward_mean": 0.375}, None)
    assert header is not None and header.count("held-out") == 1 and "0.375" in row
    header, row = table.lines(2, {**_ROW, "eval/x/reward_mean": 0.375, "eval/x/accuracy": 0.75}, None)
    assert "75.0%" in row and "0.375" not in row
    assert held_out(["eval/a/reward_mean", "eval/b/reward_mean", "eval/b/accuracy", "eval/a/response_tokens_mean"]) == [
        "eval/a/reward_mean",
        "eval/b/accuracy",
    ]
