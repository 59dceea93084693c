"""Actors, graders, Ray and drivers that are killed or stopped in a named phase or task of the start."""

import itertools
import os
import random
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.chaos.layouts import LAYOUTS, arguments_of, assert_same
from tests.rlpipe.run_support import (
    MARK,
    PROJECT,
    assert_no_process_is_left,
    metric_rows,
    run_command,
)

STARTS = ("starting engines", "starting the actor", "warm start", "waiting for the engines", "sending weights")
PHASES = ("0:eval", "1:rollout", "2:train", "2:weight_sync", "2:eval", "2:checkpoint", "3:train", "4:checkpoint")
HEALS = ("fault.actor_restarts=2", "fault.probe_seconds=1")

SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
ACTOR_STRIKES = list(itertools.product(LAYOUTS, SIGNALS, (*STARTS[2:], *PHASES)))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Of each layout the folder of a whole run."""
    found = {}
    for layout in LAYOUTS:
        folder = tmp_path_factory.mktemp("undisturbed")
        run_command("train", *arguments_of(layout, folder))
        found[layout] = folder / "small"
    return found


def struck(
    folder: Path, strike: tuple[str, str, int, signal.Signals, float], *more: str, layout: str = "one process"
) -> tuple[int, str]:
    """Exit code and output of a run that has met `strike`."""
    mark = uuid.uuid4().hex
    words = [strike[0], strike[1], str(strike[2]), strike[3].name, str(strike[4])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.struck_train", *words, *arguments_of(layout, folder, *more)],
        cwd=PROJECT,
        env={**os.environ, MARK: mark, "PYTHONPATH": str(PROJECT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert_no_process_is_left(mark)
    assert "strike: " in done.stdout
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "number", "where"), random.Random(0).sample(ACTOR_STRIKES, 24))
def test_a_lost_actor_leaves_the_bits_as_they_are(undisturbed, tmp_path, layout, number, where):
    which = 0 if where in STARTS else -1
    code, output = struck(tmp_path, (where, "actor", which, number, 0.02), *HEALS, layout=layout)
    assert code == 0, output
    assert_same(undisturbed[layout], tmp_path / "small")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["0:eval", "1:rollout", "3:rollout"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_grader_costs_no_sample(undisturbed, tmp_path, number, where):
    code, output = struck(tmp_path, (where, "grader", 0, number, 0.05), "reward.timeout_seconds=3")
    assert code == 0, output
    assert_same(undisturbed["one process"], tmp_path / "small")


@pytest.mark.slow
@pytest.mark.parametrize("where", [STARTS[0], STARTS[2], "1:rollout", "3:train", "3:eval"])
@pytest.mark.parametrize(
    ("victim", "number"), [("raylet", signal.SIGKILL), ("gcs", signal.SIGKILL), ("raylet", signal.SIGSTOP)]
)
def test_a_lost_ray_is_one_sentence_and_is_resumed(undisturbed, tmp_path, victim, number, where):
    code, output = struck(tmp_path, (where, victim, 0, number, 0.05))
    assert code == 2, output
    (sentence,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert f"the {'GCS' if victim == 'gcs' else 'raylet'} of this machine" in sentence
    assert ("continue with --resume" in sentence) == (where[0] == "3")
    run_command("train", *arguments_of("one process", tmp_path), "--requeued")
    assert_same(undisturbed["one process"], tmp_path / "small")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["starting Ray", *STARTS, *PHASES])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_ended_is_resumed(undisturbed, tmp_path, number, where):
    code, output = struck(tmp_path, (where, "driver", 0, number, 0.02))
    if number is signal.SIGTERM:
        assert code == 130, output
        assert "interrupted; everything that was started is stopped; logs: " in output
    if number is signal.SIGTERM and ":" in where:
        (*_, last) = [0, *(row["iteration"] for row in metric_rows(tmp_path / "small"))]
        assert f"iteration_{last:08d}; continue with --resume" in output
    run_command("train", *arguments_of("one process", tmp_path), "--requeued")
    assert_same(undisturbed["one process"], tmp_path / "small")
