"""Files and the report of a run of months: nothing takes minutes, or memory for all that was written."""

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.monitoring import json_lines
from rlpipe.monitoring.json_lines import JsonRows, append_json_line, drop_rows_from, read_ends, read_json_lines
from rlpipe.monitoring.report.figure import draw
from rlpipe.monitoring.report.history import read_history
from rlpipe.monitoring.report.page import render
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.phases import PHASES

ITERATIONS = 1500
LINES = st.lists(st.sampled_from([b'{"iteration": 1}', b'{"iteration": 22, "text": "a\\nb"}', b"torn", b"", b"  "]))


@contextmanager
def _at_most_bytes(most: int) -> Iterator[None]:
    """Of all threads: tests before this one may have left some, which allocate too."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    directory = RunDirectory(tmp_path_factory.mktemp("long"))
    directory.config.write_text("run: {name: x}\n")
    seconds = {f"time/{phase}_seconds": 0.5 for phase in PHASES}
    rows = [
        {"iteration": iteration, "rollout/reward_mean": iteration, "time/step_seconds": 9.0, **seconds}
        for iteration in range(1, ITERATIONS + 1)
    ]
    directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ranks = [
        {"iteration": row["iteration"], "name": f"actor-{rank}", "host": "h", "seconds": {"forward": row["iteration"]}}
        for row in rows
        for rank in range(3)
    ]
    directory.ranks.write_text("".join(json.dumps(row) + "\n" for row in ranks))
    samples = [{"iteration": row["iteration"], "response": f"response {row['iteration']}. " * 1000} for row in rows]
    directory.samples.write_text("".join(json.dumps(row) + "\n" for row in samples))
    return directory


def test_the_picture_of_a_long_run_has_a_bar_for_several_iterations(long_run):
    phases = draw(read_history(long_run.path)).axes[2]
    bars = len(phases.patches) / len(PHASES)
    assert 60 <= bars <= 120
    assert phases.get_title() == "seconds of each phase, means of 13 iterations"
    assert {round(bar.get_height(), 9) for bar in phases.patches} == {0.5}
    first, last = phases.patches[0], phases.patches[int(bars) - 1]
    assert first.get_x() < 2 and last.get_x() + last.get_width() > ITERATIONS - 2


def test_the_page_of_a_long_run_shows_some_rows_and_the_last_ones_and_says_so(long_run):
    page = render(read_history(long_run.path))
    shown = page[page.index("One row in 4, and the last 20") :]
    iterations = [text.partition("</td>")[0] for text in shown.split("<tr><td>")[1:]]
    expected = [*range(1, ITERATIONS - 19, 4), *range(ITERATIONS - 19, ITERATIONS + 1)]
    assert iterations[: len(expected)] == [str(iteration) for iteration in expected]
    for iteration in (1, 2, ITERATIONS - 5, ITERATIONS):
        assert f"response {iteration}. response" in page
    assert "response 3. response" not in page


def test_a_report_reads_of_samples_and_ranks_what_it_shows(long_run):
    assert long_run.samples.stat().st_size > 2 * 10**7
    with _at_most_bytes(10**7):
        history = read_history(long_run.path)
    assert [row["iteration"] for row in history.samples] == [1, 2, *range(ITERATIONS - 5, ITERATIONS + 1)]
    assert [(row["name"], row["iteration"]) for row in history.ranks] == [
        (f"actor-{rank}", ITERATIONS) for rank in range(3)
    ]


def test_all_ranks_of_the_last_iteration_are_read_however_many_they_are(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.config.write_text("run: {name: x}\n")
    directory.metrics.write_text('{"iteration": 1}\n{"iteration": 2}\n')
    row = {"host": "h", "seconds": {"forward": 1.0}}
    rows = [row | {"iteration": iteration, "name": f"actor-{rank}"} for iteration in (1, 2) for rank in range(1000)]
    directory.ranks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["name"] for row in read_history(tmp_path).ranks] == [f"actor-{rank}" for rank in range(1000)]


@given(lines=LINES, first=st.integers(0, 4), last=st.integers(1, 4), block=st.integers(1, 60), ended=st.booleans())
def test_ends_of_a_file_are_its_first_and_last_lines(tmp_path_factory, lines, first, last, block, ended):
    path = tmp_path_factory.mktemp("ends") / "rows.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n" * ended)
    whole = [line for line in lines if line.strip()]
    kept = whole if len(whole) <= first + last else [*whole[:first], *whole[-last:]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "_BLOCK_BYTES", block)
        found = read_ends(path, first, last)
    path.write_bytes(b"\n".join(kept))
    assert found == read_json_lines(path)


def test_a_resumed_run_cuts_its_files_without_reading_them_into_memory(long_run, tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(long_run.samples.read_bytes())
    before = path.stat()
    with _at_most_bytes(5 * 10**6):
        assert drop_rows_from(path, ITERATIONS + 1) == []
    assert path.stat() == before  # nothing was to be cut
    with _at_most_bytes(5 * 10**6):
        assert drop_rows_from(path, ITERATIONS) == []
    assert path.read_bytes() == b"".join(long_run.samples.read_bytes().splitlines(keepends=True)[:-1])
    assert path.stat().st_ino == before.st_ino  # the end was cut off, and no copy made
    assert list(tmp_path.iterdir()) == [path]


ROWS = st.sampled_from(
    ['{"iteration": 1}', '{"iteration": 5, "text": "é"}', '{"iteration": 9}', '{"iter', "[]", "", " "]
)


@given(lines=st.lists(ROWS), ended=st.booleans())
def test_exactly_the_rows_before_the_iteration_stay_and_more_can_be_appended(tmp_path_factory, lines, ended):
    path = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n" * ended)
    notes = drop_rows_from(path, 9)
    append_json_line(path, {"iteration": 9})
    kept = [json.loads(line) for line in lines if line in ('{"iteration": 1}', '{"iteration": 5, "text": "é"}')]
    assert read_json_lines(path) == JsonRows((*kept, {"iteration": 9}))
    damaged = sum(line in ('{"iter', "[]") for line in lines)
    assert [note.rpartition(": ")[2] for note in notes] == (
        [f"{damaged} damaged line{'s were' if damaged > 1 else ' was'} removed"] if damaged else []
    )
