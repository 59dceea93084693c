"""Where the time of a real run went: one small run with a sleep planted in every phase of one iteration."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe.iteration import PHASES

_PROJECT = Path(__file__).parents[2]
PLANTED_ITERATION = 2
SLEEP_SECONDS = 0.7
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
        "actor.processes=2",
        "actor.threads=1",
        "checkpoint.interval_iterations=2",
    ]
    program = [sys.executable, str(Path(__file__).with_name("planted_run.py"))]
    process = subprocess.run(
        [*program, str(PLANTED_ITERATION), str(SLEEP_SECONDS), "configs/demo/arithmetic.yaml", *settings],
        cwd=_PROJECT,
        env={**os.environ, "PYTHONPATH": str(_PROJECT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return folder / "small"


@pytest.fixture(scope="module")
def rows(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["iteration"]: row for row in lines}


def test_phases_explain_98_percent_of_every_iteration(rows):
    for iteration in (1, 2, 3):
        row = rows[iteration]
        claimed = sum(row[f"time/{phase}_seconds"] for phase in PHASES)
        assert claimed + row["time/unaccounted_seconds"] == pytest.approx(row["time/step_seconds"])
        assert abs(row["time/unaccounted_share"]) <= 0.02


def test_a_planted_sleep_shows_in_its_phase_and_its_iteration(rows):
    for phase in PLANTED_PHASES:
        assert rows[PLANTED_ITERATION][f"time/{phase}_seconds"] >= SLEEP_SECONDS, phase
    for phase in SHORT_PHASES:
        for iteration in (1, 3):
            assert rows[iteration][f"time/{phase}_seconds"] < SLEEP_SECONDS, (phase, iteration)


def test_every_rank_is_on_file_with_its_host(run, rows):
    ranks = [json.loads(line) for line in (run / "ranks.jsonl").read_text().splitlines()]
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
