"""The report of a run: figures and page from the rows that a run writes."""

import json
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.monitoring.json_lines import append_json_line, drop_rows_from, read_json_lines
from rlpipe.monitoring.metric_dictionary import METRICS
from rlpipe.monitoring.report import write_report
from rlpipe.monitoring.report.figure import draw
from rlpipe.monitoring.report.history import read_history
from rlpipe.monitoring.report.table import performance_table
from rlpipe.monitoring.run_directory import RunDirectory
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


def test_no_legend_lies_on_the_figures_of_a_run_that_meets_nothing(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.config.write_text("run: {name: x}\n")
    for iteration in range(3):
        row = {"iteration": iteration, "rollout/accuracy": 0.0, "eval/held_out/accuracy": 0.0}
        append_json_line(directory.metrics, row)
    figure = draw(read_history(tmp_path))
    figure.draw_without_rendering()
    quality = figure.axes[1]
    told = [text.get_window_extent() for text in quality.texts]
    assert len(told) == 2 and quality.get_legend().get_window_extent().count_overlaps(told) == 0


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_supervised_run_is_drawn_by_its_losses_and_without_rewards(tmp_path, evaluated):
    directory = RunDirectory(tmp_path)
    directory.config.write_text("run: {name: x}\n")
    for iteration in range(4):
        row = {"iteration": iteration, "time/step_seconds": 1.0, "time/train_seconds": 1.0}
        row |= {"train/loss": 3.0 - iteration} if iteration else {}
        row |= {"eval/held_out/loss": 4.0 - iteration} if evaluated and iteration % 2 == 0 else {}
        append_json_line(directory.metrics, row)
    figure = draw(read_history(tmp_path))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["loss, nats per token", "seconds of each phase"]
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    held_out = {"held-out: held_out": [4.0, 2.0]} if evaluated else {}
    assert lines == {**held_out, "trained": [2.0, 1.0, 0.0]}
    page = write_report(tmp_path).page.read_text()
    assert ("Held-out loss (held_out): 4 → 2." in page) == evaluated


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


def test_what_did_not_happen_is_not_shown(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.config.write_text("run: {name: x}\n")
    for iteration in (1, 2, 3):
        row = {"iteration": iteration, "time/step_seconds": 4.0, "time/rollout_seconds": 4.0 - 7e-6}
        row |= {"time/ref_logprob_seconds": 7e-6, "time/eval_seconds": 0.0, "fault/engine_restarts_count": 0.0}
        append_json_line(directory.metrics, row | {"perf/actor_train_seconds": 1.0, "train/loss": 0.5 * iteration})
    page = write_report(tmp_path).page.read_text()
    for absent in ("reference log-probs", "ref logprob s", "evaluation", "<h2>Samples", "<h2>Ranks", "MFU"):
        assert absent not in page, absent
    assert "Zero throughout: lost engines." in page


def test_samples_are_shown_with_their_grades_the_latest_first(tmp_path):
    directory = _run(tmp_path)
    grades = {"reward": 1.0, "correct": True, "component format": 0.5, "reason": "5 is 5"}
    append_json_line(directory.samples, {"iteration": 2, "prompt": "2+3", "response": "5", "label": "5", **grades})
    page = write_report(tmp_path).page.read_text()
    first = page[page.index("<article") :].split("</article>")[0]
    for shown in ("iteration 2", "reward 1<", "✓ correct", "format 0.5", "5 is 5", "2+3"):
        assert shown in first


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(DataError, match="no run here"):
        write_report(tmp_path)
    RunDirectory(tmp_path).config.write_text("")
    with pytest.raises(DataError, match="no finished iteration"):
        write_report(tmp_path)


def test_rows_of_iterations_to_be_redone_are_dropped(tmp_path):
    directory = _run(tmp_path)
    drop_rows_from(directory.metrics, 2)
    assert [row["iteration"] for row in read_json_lines(directory.metrics).rows] == [0, 1]


_DAMAGE = {
    "torn last row": '{"iteration": 3, "rollout/rew',
    "no object": "[1]\n",
    "no iteration": '{"rollout/reward_mean": 1}\n',
    "an iteration that is text": '{"iteration": "3"}\n',
    "an endless number": '{"iteration": ' + "9" * 5000 + "}\n",
    "deep": "[" * 5000 + "\n",
    "bytes": "\udcff\udc80\n",
}


@pytest.mark.parametrize("text", _DAMAGE.values(), ids=_DAMAGE)
def test_a_damaged_line_is_left_out_and_counted(tmp_path, text):
    directory = _run(tmp_path)
    for path in (directory.metrics, directory.samples, directory.ranks):
        with path.open("ab") as file:
            file.write(text.encode("utf-8", errors="surrogateescape"))
    page = write_report(tmp_path).page.read_text()
    for path in (directory.metrics, directory.samples, directory.ranks):
        assert f"{path.name}: 1 damaged line is left out" in page
    assert [note.split(": ")[-1] for note in drop_rows_from(directory.metrics, 2)] == ["1 damaged line was removed"]
    assert [row["iteration"] for row in read_json_lines(directory.metrics).rows] == [0, 1]
    assert read_json_lines(directory.metrics).damaged == 0


def test_numbers_that_are_none_are_left_out_and_named(tmp_path):
    directory = _run(tmp_path)
    strange = [math.nan, math.inf, -math.inf, 1e300, 10**400, "x", None, True, [1]]
    for iteration, value in enumerate(strange, start=3):
        row = {"iteration": iteration, "train/loss": value, "ranks/slowest": value, "time/step_seconds": value}
        append_json_line(directory.metrics, {**row, "ranks/compute_mean_seconds": 1, "ranks/compute_max_seconds": 2})
    page = write_report(tmp_path).page.read_text()
    assert "train/loss is no finite number in iteration 3, 4, 5, 6, 7, ...; it is left out there." in page
    assert performance_table(read_history(tmp_path))


def test_halves_of_characters_and_dollars_are_shown(tmp_path):
    folder = tmp_path / "a$b$"
    folder.mkdir()
    directory = _run(folder)
    append_json_line(directory.metrics, {"iteration": 3, "eval/$x_$/accuracy": 0.5, "\ud800": 1.0})
    append_json_line(directory.samples, {"iteration": 3, "prompt": "\ud800 half", "response": "$x_$"})
    page = write_report(folder).page.read_text()
    assert "? half" in page and "held-out: $x_$" in page
    assert json.loads(directory.samples.read_text().splitlines()[-1])["prompt"] == "\ud800 half"


def test_events_that_are_not_whole_are_left_out_and_counted(tmp_path):
    directory = _run(tmp_path)
    directory.jit_events.parent.mkdir(exist_ok=True)
    whole = {"iteration": 3, "kind": "triton", "name": "l2norm", "seconds": 1.0, "compiled": True}
    process = {"iteration": 3, "kind": "compiler process", "compiler_seconds": 2.0, "grown_caches": ["triton"]}
    damaged = {"iteration": 3, "compiled": True}, {**whole, "kind": None}
    for row in (whole, process, {**process, "seconds": 1.0}, *damaged):
        append_json_line(directory.jit_events, row)
    page = write_report(tmp_path).page.read_text()
    assert "triton l2norm (1x)" in page and "jit.jsonl: 2 damaged lines are left out." in page


_VALUES = st.none() | st.floats() | st.integers() | st.text(max_size=3) | st.booleans() | st.just([]) | st.just({})
_NAMES = st.sampled_from(sorted(METRICS)) | st.sampled_from(
    ["iteration", "seconds", "name", "host", "kind", "compiled"]
)
_ROWS = st.lists(
    st.dictionaries(_NAMES, _VALUES, max_size=6).flatmap(
        lambda row: st.builds(lambda number: {**row, "iteration": number}, st.integers(0, 4) | _VALUES)
    ),
    max_size=5,
)


@settings(max_examples=25)
@given(st.fixed_dictionaries({name: _ROWS for name in ("metrics", "samples", "ranks", "logs/jit")}))
def test_no_rows_make_a_traceback(files):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        (folder / "config.yaml").write_text("run: {name: x}\n")
        for file, rows in files.items():
            for row in rows:
                append_json_line(folder / f"{file}.jsonl", row)
        try:
            write_report(folder)
            performance_table(read_history(folder))
        except DataError as error:
            assert str(error)


def test_seconds_of_a_kernel_are_those_of_all_workers_and_iterations(tmp_path):
    directory = _run(tmp_path)
    directory.jit_events.parent.mkdir(exist_ok=True)
    for iteration, seconds in ((1, 1.5), (1, 1.25), (2, 0.5)):
        event = {"iteration": iteration, "kind": "triton", "name": "l2norm", "seconds": seconds, "compiled": True}
        append_json_line(directory.jit_events, event)
    page = write_report(tmp_path).page.read_text()
    assert "<td class='text'>l2norm</td><td>triton</td><td>3</td><td>3.25</td><td>2</td>" in page
