"""Where the time of a real run went: one small run with a sleep planted in every phase of one iteration, a kernel that
compiles in every training call, and a rank that is slow once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlpipe.cli import app
from rlpipe.shared.phases import PHASES, TRAINING_PARTS
from tests.search_path import search_path

pytestmark = pytest.mark.slow
_PROJECT = Path(__file__).parents[2]
PLANTED_ITERATION = 2
SLEEP_SECONDS = 0.7
BUSY_SECONDS = 0.1
"""For which a busy machine may keep the driver from going on, between two phases too."""
SLOW_ITERATION = 3
PEAK_TFLOPS = 0.5
# Phases that take next to nothing in so small a run, so that the sleep must be missing in the other iterations.
SHORT_PHASES = ("reward", "old_logprob", "advantage", "pack", "train_other", "tracking")
PLANTED_PHASES = (*SHORT_PHASES, "rollout", "ref_logprob", "weight_sync", "eval", "checkpoint")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Folder of a run of three iterations on two actor processes."""
    folder = tmp_path_factory.mktemp("planted")
    settings = [
        "run.name=small",
        "run.iterations=3",
        f"run.directory={folder}",
        f"model.path={folder}/policy",
        f"prepare.directory={folder}/task",
        "prepare.arithmetic.train_problems=64",
        "prepare.arithmetic.test_problems=8",
        "warm_start=null",
        "eval.interval_iterations=2",
        "rollout.prompts_per_iteration=4",
        "rollout.samples_per_prompt=2",
        "rollout.max_response_tokens=12",
        "algorithm.kl.coefficient=0.01",
        "algorithm.updates_per_iteration=1",
        "algorithm.old_policy=actor",
        "actor.processes=2",
        "actor.threads=1",
        f"actor.peak_tflops={PEAK_TFLOPS}",
        "checkpoint.interval_iterations=2",
        "trace.iterations=[3]",
        f"jit.cache_directory={folder}/kernels",
    ]
    path = search_path(Path(__file__).with_name("planted"))
    program = [sys.executable, str(Path(__file__).with_name("planted_run.py"))]
    process = subprocess.run(
        [*program, str(PLANTED_ITERATION), str(SLEEP_SECONDS), "configs/demo/arithmetic.yaml", *settings],
        cwd=_PROJECT,
        env={**os.environ, "PYTHONPATH": path, "RLPIPE_TEST_SLOW_CALL": str(SLOW_ITERATION)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    (folder / "output").write_text(process.stdout)
    return folder / "small"


@pytest.fixture(scope="module")
def rows(run):
    lines = _lines(run / "metrics.jsonl")
    return {row["iteration"]: row for row in lines}


def test_the_start_is_divided_into_what_the_driver_waited_for(rows):
    start = {name[6:-8]: value for name, value in rows[0].items() if name.startswith("start/")}
    waited = sum(start[part] for part in ("inputs", "ray", "engines", "actor", "warm_up", "weights"))
    assert 0.8 * start["total"] < waited <= start["total"]
    assert min(start["engine_import"], start["engine_load"], start["actor_import"]) > 0.1
    built = [start[f"actor_build_{part}"] for part in ("model", "weights", "gradients", "optimizer")]
    assert max(built) <= start["actor_build"] < 2 * sum(built)  # each is of the process that took longest over it
    assert not any(name.startswith("start/") for name in rows[1])


def test_phases_explain_98_percent_of_every_iteration(rows):
    for iteration in (1, 2, 3):
        row = rows[iteration]
        claimed = sum(row[f"time/{phase}_seconds"] for phase in PHASES)
        assert claimed + row["time/unaccounted_seconds"] == pytest.approx(row["time/step_seconds"])
        assert abs(row["time/unaccounted_seconds"]) <= 0.02 * row["time/step_seconds"] + BUSY_SECONDS


def test_a_planted_sleep_shows_in_its_phase_and_its_iteration(rows):
    for phase in PLANTED_PHASES:
        assert rows[PLANTED_ITERATION][f"time/{phase}_seconds"] >= SLEEP_SECONDS, phase
    for phase in SHORT_PHASES:
        others = [rows[iteration][f"time/{phase}_seconds"] for iteration in (1, 3)]
        assert min(others) < SLEEP_SECONDS, (phase, others)  # either may have waited for a busy machine


def test_every_rank_is_on_file_with_its_host(run, rows):
    ranks = _lines(run / "ranks.jsonl")
    assert [(row["iteration"], row["name"]) for row in ranks] == [
        (iteration, f"actor-{rank}") for iteration in (1, 2, 3) for rank in (0, 1)
    ]
    for row in ranks:
        assert row["host"]
        assert {"forward", "backward", "optimizer", "train_exchange", "ref_logprob"} <= set(row["seconds"])
    for iteration in (1, 2, 3):
        assert rows[iteration]["ranks/slowest"] in (0, 1)
        forward = [row["seconds"]["forward"] for row in ranks if row["iteration"] == iteration]
        assert rows[iteration]["ranks/forward_max_seconds"] == pytest.approx(max(forward), abs=1e-5)
        assert rows[iteration]["time/forward_seconds"] == pytest.approx(sum(forward) / 2, abs=1e-5)


def test_a_planted_slow_rank_is_named(run, rows):
    row = rows[SLOW_ITERATION]
    assert row["ranks/slowest"] == 1
    assert row["ranks/forward_max_seconds"] >= row["ranks/forward_min_seconds"] + 0.5
    assert row["ranks/exchange_max_seconds"] >= 0.5
    ranks = [row for row in _lines(run / "ranks.jsonl") if row["iteration"] == SLOW_ITERATION]
    assert max(ranks, key=lambda row: row["seconds"]["forward"])["name"] == "actor-1"


def test_a_planted_recompiling_kernel_is_named_with_phase_step_and_rank(run, rows):
    events = [event for event in _lines(run / "logs" / "jit.jsonl") if "planted_kernel" in event.get("name", "")]
    assert [(event["iteration"], event["rank"]) for event in events] == [
        (iteration, rank) for iteration in (1, 2, 3) for rank in (0, 1)
    ]
    for event in events:
        assert (event["step"], event["phase"]) == (event["iteration"], "forward")
        assert event["kind"] == "dynamo" and not event["cache_hit"] and event["seconds"] > 0
    assert [rows[iteration]["perf/jit_alarms"] for iteration in (1, 2, 3)] == [0, 2, 2]
    output = (run.parent / "output").read_text()
    for rank in (0, 1):
        assert f"warning: actor-{rank}: dynamo compiled _plant.<locals>.planted_kernel" in output
    for iteration in (1, 2, 3):
        row = rows[iteration]
        assert row["perf/jit_compiles"] >= 2
        assert 0 < row["perf/jit_seconds"] < row["time/step_seconds"]
        without = row["time/step_seconds"] - row["perf/jit_seconds"]
        assert row["perf/step_excluding_jit_seconds"] == pytest.approx(without)


def test_rates_are_tokens_and_flops_over_the_seconds_of_the_same_iteration(rows):
    for iteration in (1, 2, 3):
        row = rows[iteration]
        seconds = sum(row[f"time/{part}_seconds"] for part in TRAINING_PARTS)
        assert row["perf/actor_train_seconds"] == pytest.approx(seconds)
        assert row["perf/actor_tokens_per_second"] == pytest.approx(row["perf/trained_tokens"] / seconds)
        whole = row["perf/trained_tokens"] / row["time/step_seconds"]
        assert row["perf/tokens_per_gpu_per_second"] == pytest.approx(whole / 3)  # two of the actor, one of the engine
        assert row["perf/actor_tokens_per_gpu_per_second"] == pytest.approx(row["perf/actor_tokens_per_second"] / 2)
        assert row["perf/actor_train_mfu"] == pytest.approx(row["perf/actor_train_tflops_per_gpu"] / PEAK_TFLOPS)
        assert row["perf/actor_train_hfu"] > row["perf/actor_train_mfu"]
        assert row["perf/actor_train_mfu_excluding_jit"] > row["perf/actor_train_mfu"]


def test_the_comparison_table_comes_out_of_one_command(run):
    result = CliRunner().invoke(app, ["report", str(run), "--table", "--window", "1"])
    assert result.exit_code == 0, result.output
    printed = result.output.splitlines()
    assert printed[0].split()[-1] == "HFU"
    assert [line.split()[0] for line in printed[1:4]] == ["[1]", "2", "3"]
    assert printed[4].split()[:2] == ["last", "1"] and printed[5].split()[:2] == ["all", "2"]
    assert printed[4].split()[2:] == printed[3].split()[1:]


def test_cache_directories_are_set_before_workers_import_anything(run):
    (triton,) = (run.parent / "kernels").glob("torch*-cpu-*/triton")
    assert triton.is_dir()


def test_the_trace_of_a_chosen_iteration_shows_all_roles(run):
    assert [path.name for path in (run / "traces").iterdir()] == ["iteration_000003.json"]
    events = json.loads((run / "traces" / "iteration_000003.json").read_text())["traceEvents"]
    workers = {event["pid"]: event["args"]["name"].split()[0] for event in events if event["name"] == "process_name"}
    assert list(workers.values()) == ["driver", "engine-0", "actor-0", "actor-1"]
    found = {name: set() for name in workers.values()}
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            found[workers[event["pid"]]].add(event["name"])
    assert {"rollout", "train", "weight_sync"} <= found["driver"]
    assert {"generate", "weight_sync"} <= found["engine-0"]
    assert {"train", "forward", "backward", "optimizer", "exchange", "ref_logprob"} <= found["actor-1"]
    assert "weight_sync" in found["actor-0"]


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
