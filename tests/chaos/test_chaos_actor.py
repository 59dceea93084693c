"""Actors, graders, Ray and drivers that are killed or stopped in a named phase or task of the start."""

import itertools
import random
from collections.abc import Iterable

import pytest

from tests.chaos.chaos_schedule import MOMENTS, SIGNALS, STARTS, Strike
from tests.chaos.chaos_support import LAYOUTS, assert_resumed, assert_same_bits, disturbed_run
from tests.rlpipe.run_support import metric_rows

TASKS = tuple((task, None) for task in STARTS)
HEALS = ("fault.actor_restarts=3", "fault.probe_seconds=1")
RAY = (("raylet", "kill"), ("gcs", "kill"), ("raylet", "stop"), ("gcs", "stop"))


def drawn(seed: int, kinds: Iterable[tuple], count: int) -> list[tuple]:
    return random.Random(seed).sample(list(kinds), count)


def name_of(value: object) -> str:
    return "-".join(str(one) for one in value if one is not None) if isinstance(value, tuple) else str(value)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_lost_actor_leaves_the_bits_as_they_are(undisturbed, tmp_path, layout, seed):
    """Its last process while it trains, its first one in the start, three times."""
    kinds = drawn(seed + 2 * list(LAYOUTS).index(layout), itertools.product(SIGNALS, (*TASKS[3:], *MOMENTS)), 3)
    strikes = [Strike("actor", how, *where, 0.02, which=0 if where in TASKS else -1) for how, where in kinds]
    run = disturbed_run(tmp_path, strikes, *LAYOUTS[layout], *HEALS)
    assert run.code == 0, run.evidence
    assert {row["strike"] for row in run.strikes} == {strike.name for strike in strikes}
    assert_same_bits(run.folder, undisturbed(*LAYOUTS[layout]).folder)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("task", ["starting the actor", "waiting for the engines"])
def test_an_actor_lost_beside_engines_that_start_is_started_again(undisturbed, tmp_path, task, how):
    """With all engines."""
    shared = LAYOUTS["shared memory"]
    run = disturbed_run(tmp_path, [Strike("actor", how, task, None, 0.02)], *shared, "ray.start=beside", *HEALS)
    assert run.code == 0, run.evidence
    assert run.output.count("the actor is built beside the engines") == len(run.strikes) + 1 == 2
    assert_same_bits(run.folder, undisturbed(*shared).folder)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_lost_grader_costs_no_sample(undisturbed, tmp_path, how):
    strikes = [Strike("grader", how, *where, 0.05) for where in (("eval", 0), ("rollout", 1), ("rollout", 3))]
    run = disturbed_run(tmp_path, strikes, "reward.timeout_seconds=3")
    assert run.code == 0, run.evidence
    assert len(run.strikes) == len(strikes)
    assert_same_bits(run.folder, undisturbed().folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "where"),
    drawn(0, itertools.product(RAY, (TASKS[1], TASKS[3], ("rollout", 1), ("train", 3), ("eval", 3))), 12),
    ids=name_of,
)
def test_a_lost_ray_is_one_sentence_and_is_resumed(undisturbed, tmp_path, kind, where):
    victim, how = kind
    run = disturbed_run(tmp_path, [Strike(victim, how, *where, 0.05)])
    assert run.strikes
    assert run.code == 2, run.evidence
    (sentence,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert f"the {'GCS' if victim == 'gcs' else 'raylet'} of this machine" in sentence
    complete = list((run.folder / "checkpoints").glob("iteration_*"))  # not yet, where a busy machine still writes it
    assert ("continue with --resume" in sentence) == bool(complete)
    assert_resumed(tmp_path, undisturbed())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "where"), drawn(0, itertools.product(("exit", "kill"), (*TASKS, *MOMENTS)), 12), ids=name_of
)
def test_a_driver_that_is_ended_is_resumed(undisturbed, tmp_path, how, where):
    run = disturbed_run(tmp_path, [Strike("driver", how, *where, 0.02)])
    assert run.strikes
    if how == "exit":
        assert run.code == 130, run.evidence
        assert "interrupted; everything that was started is stopped" in run.output, run.evidence
        assert ("; logs: " in run.output) == (run.folder / "logs").exists(), run.evidence
    if how == "exit" and where in MOMENTS:
        (*_, last) = [0, *(row["iteration"] for row in metric_rows(run.folder))]
        assert f"iteration_{last:08d}; continue with --resume" in run.output, run.evidence
    assert_resumed(tmp_path, undisturbed())
