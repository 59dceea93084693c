"""The report of a run: figures and page from the rows that a run writes."""

import pytest

from rlpipe.monitoring.report import write_report
from rlpipe.monitoring.run_directory import RunDirectory, append_json_line, drop_rows_from, read_json_lines
from rlpipe.shared.errors import DataError
from rlpipe.shared.phases import PHASES


def _run(folder):
    directory = RunDirectory(folder)
    directory.config.write_text("run: {name: x}\n")
    times = {f"time/{phase}_seconds": 0.5 for phase in PHASES}
    append_json_line(directory.metrics, {"iteration": 0, "eval/held_out/accuracy": 0.25, **times})
    for iteration in (1, 2):
        row = {
            "iteration": iteration,
            "rollout/reward_mean": 0.1 * iteration,
            "rollout/reward_std": 0.4,
            "rollout/accuracy": 0.3,
            "eval/held_out/accuracy": 0.25 + 0.25 * iteration,
            "time/step_seconds": 7.5,
            "time/unaccounted_seconds": 0.25,
            **times,
        }
        append_json_line(directory.metrics, row)
        sample = {"iteration": iteration, "prompt": "<b>2+2</b>", "response": "5", "label": "4", "reward": 0.0}
        append_json_line(directory.samples, sample)
    return directory


def test_the_report_shows_accuracy_phases_and_escaped_samples(tmp_path):
    _run(tmp_path)
    files = write_report(tmp_path)
    assert files.picture.read_bytes().startswith(b"\x89PNG")
    page = files.page.read_text()
    assert "Held-out accuracy (held_out): 25.0% → 75.0%." in page
    assert "&lt;b&gt;2+2&lt;/b&gt;" in page
    assert "<svg" in page
    assert "src=" not in page
    assert "backward" in page


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(DataError, match="no run here"):
        write_report(tmp_path)
    RunDirectory(tmp_path).config.write_text("")
    with pytest.raises(DataError, match="no finished iteration"):
        write_report(tmp_path)


def test_rows_of_iterations_to_be_redone_are_dropped(tmp_path):
    directory = _run(tmp_path)
    drop_rows_from(directory.metrics, 2)
    assert [row["iteration"] for row in read_json_lines(directory.metrics)] == [0, 1]
