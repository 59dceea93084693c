"""Recording and comparing: what a machine of the same kind has recorded, with speeds as multiples of a calibration."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlpipe.commands.cards.record_file import Record

PROJECT = Path(__file__).resolve().parents[2]
OLD = Record("driver_scale", "python benchmarks/driver_scale.py", "2026-01-02", "2 cores of X", {}, "", "abc")
OUTPUT = "  65,536 samples  rollout 1 s: 2 s, {us} us a sample, {memory} bytes of metrics"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))


def _record(us, memory, calibration):
    return replace(OLD, output=OUTPUT.format(us=us, memory=memory), calibration_seconds=calibration)


@pytest.mark.parametrize(
    ("new", "within"),
    [
        (_record(30.0, 100.0, 0.1), [True, True]),
        (_record(34.0, 101.9, 0.1), [True, True]),  # 13 % slower, 1.9 % more bytes
        (_record(35.0, 102.5, 0.1), [False, False]),
        (_record(60.0, 100.0, 0.2), [True, True]),  # the whole machine is slower
        (_record(60.0, 100.0, 0.1), [True, False]),
        (_record(10.0, 50.0, 0.1), [False, True]),  # faster is no fault; other bytes are, whichever way
        (_record(30.0, 100.0, None), [True, False]),
        (replace(OLD, output="nothing", calibration_seconds=0.1), [False, False]),
    ],
)
def test_bytes_are_compared_as_they_are_and_seconds_by_the_calibration(benchmarks, new, within):
    from compare_records import compare

    found = list(compare(_record(30.0, 100.0, 0.1), new))
    assert [one.kind for one in found] == ["bytes", "seconds"]
    assert [one.within for one in found] == within
    assert all(("ok" in str(one)) is one.within for one in found)


def test_every_compared_figure_is_found_in_what_is_recorded(benchmarks):
    from compare_records import COMPARED

    for file in (PROJECT / "benchmarks" / "results").glob("*.json"):
        record = Record(**json.loads(file.read_text()))
        for figure in COMPARED.get(record.name, ()):
            values = figure.values(record.output)
            assert values and all(value == value for value in values.values()), f"{file.name}: {figure.label}"


def test_a_benchmark_is_calibrated_in_its_own_process(benchmarks, tmp_path):
    from calibrated import without_calibration

    (tmp_path / "neighbour.py").write_text("WORD = 'found'\n")
    script = tmp_path / "benchmark.py"
    script.write_text(
        "import sys\nfrom neighbour import WORD\nif __name__ == '__main__':\n    print(WORD, sys.argv[1:])\n"
    )
    command = [sys.executable, str(PROJECT / "benchmarks" / "calibrated.py"), str(script), "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    output, seconds = without_calibration(done.stdout)
    assert output == "found ['--seed', '3']" and seconds > 0
    assert without_calibration("no line") == ("no line", None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packing", "monitoring_overhead"])
def test_a_benchmark_still_prints_what_is_compared(benchmarks, name):
    from compare_records import COMPARED

    done = subprocess.run([sys.executable, f"benchmarks/{name}.py"], capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    assert all(figure.values(done.stdout) for figure in COMPARED[name])


def test_the_driver_s_work_is_measured_with_engines_that_are_stand_ins():
    command = [sys.executable, "-W", "ignore", "benchmarks/driver_scale.py", "--once", "--samples", "512"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, cwd=PROJECT)
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"rollout", "metrics", "advantage", "pack", "send", "look", "metrics_bytes"} == set(found)
    assert all(value > 0 for value in found.values())


def test_the_driver_s_work_is_set_beside_a_step_with_responses_as_long_as_the_step_s(benchmarks):
    import driver_scale

    one = dict.fromkeys(driver_scale.PARTS, 1.0)
    limit, step = driver_scale.recipe(512).rollout.max_response_tokens, driver_scale.planned_step(512)
    further = dict.fromkeys(driver_scale.PARTS, 0.0) | {"rollout": 2 * step / 512 / (limit - 32)}
    line = driver_scale.beside_a_step(512, one, further, 32)
    beside, between = line.split("beside the engines")[1].split("between them")
    assert beside.startswith(f" {1 + 2 * step:.0f} s") and between == f" 3.0 s ({3 / step:.1%})"


SLOW = """
import subprocess, sys, time
print("first row", flush=True)
try:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(300)"])
    print("second row", flush=True)
finally:
    print("cleaned up", flush=True)
"""


@pytest.fixture
def in_the_background() -> Iterator[None]:
    """As a shell starts it there: interrupts are ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_what_a_benchmark_printed_within_its_limit_is_kept_and_marked(
    benchmarks, in_the_background, monkeypatch, tmp_path
):
    import record

    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/slow.py").write_text(SLOW)
    (tmp_path / "benchmarks/calibrated.py").write_text((PROJECT / "benchmarks/calibrated.py").read_text())
    monkeypatch.setattr(record, "PROJECT", tmp_path)
    cut_off = record.run("slow", [], limit_seconds=8)
    assert cut_off.output.splitlines() == ["first row", "cleaned up", "cut off after 8 seconds"]
    assert cut_off.calibration_seconds is None
    with pytest.raises(subprocess.CalledProcessError):
        record.run("missing", [], limit_seconds=60)


def test_a_benchmark_has_time_to_print_when_its_run_had_to_be_killed(benchmarks):
    """Both are interrupted at once, and each waits for what it started."""
    import record
    import train_run
    import whole_step

    assert max(train_run._END_SECONDS, whole_step._END_SECONDS) + 10 < record._END_SECONDS


def test_of_a_suite_that_runs_pytest_twice_both_summaries_are_kept(benchmarks, monkeypatch, tmp_path):
    import record

    (tmp_path / "test_two.py").write_text("import pytest\ndef test_a(): pass\n@pytest.mark.skip\ndef test_b(): pass\n")
    run = f"cd {tmp_path} && {sys.executable} -m pytest -p no:cacheprovider -o addopts= test_two.py"
    (tmp_path / "suite.sh").write_text(f"{run} -k test_a\nseq 100\n{run} -k test_b -rs\n")
    monkeypatch.setitem(record.SUITES, "default_suite", record.Suite(command=f"bash {tmp_path}/suite.sh"))
    first, *last = record.run("default_suite", []).output.splitlines()
    assert "1 passed, 1 deselected" in first
    assert len(last) == 40 and "1 skipped, 1 deselected" in last[-1]


def test_what_can_be_recorded_has_its_program_and_every_question_its_section(benchmarks):
    import record

    for name, benchmark in record.BENCHMARKS.items():
        program = (benchmark.runs or name).split()[0]
        assert (PROJECT / f"benchmarks/{program}.py").is_file(), name
    assert set(record._RECORDED.questions) <= set(record.BENCHMARKS)
    assert not set(record.SUITES) & set(record.BENCHMARKS)


def test_every_test_of_gpus_is_in_a_suite(benchmarks):
    import record

    commands = [suite.command for suite in record.SUITES.values() if "tests/gpu/" in suite.command]
    files = sorted(file.relative_to(PROJECT).as_posix() for file in PROJECT.glob("tests/gpu/test_*.py"))
    assert files == sorted({word for command in commands for word in command.split() if word.startswith("tests/gpu/")})
