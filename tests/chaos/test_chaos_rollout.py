"""Whole runs whose engines are killed, stopped and ended in every phase: nothing is lost, doubled or left behind."""

import itertools
import random

import pytest

from tests.chaos.chaos_schedule import PHASES, ROLLOUT, SIGNALS, Strike, drawn_schedule
from tests.chaos.chaos_support import assert_healed, disturbed_run

ITERATIONS = 6
LONGER = ("run.iterations=6", "rollout.max_response_tokens=160", "fault.engine_restarts=30")
SLOW_WEIGHTS = 'ray.environment={"RLPIPE_CHAOS_BUCKET_SECONDS": "0.5"}'
ONE, TWO = (), ("rollout.engines=2",)
WIDE = ("rollout.engine.tensor_parallel=2",)
SHARED_MEMORY = ("ray.colocate=true", "ray.sleep=always")
SENDERS = ("actor.processes=2", "actor.parallel.tensor=2")
LAYOUTS = {
    "one engine": ONE,
    "two engines": TWO,
    "an engine of two processes": WIDE,
    "two engines and two senders": (*TWO, *SENDERS),
    "shared memory": SHARED_MEMORY,
}


@pytest.fixture
def whole(undisturbed):
    """By layout the same run without a strike. How many engines there are and where changes nothing; an engine or an
    actor of two processes rounds otherwise than one of one."""
    rounding = {"an engine of two processes": WIDE, "two engines and two senders": SENDERS}
    return lambda layout: undisturbed(*LONGER, *rounding.get(layout, ONE))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_drawn_schedule_leaves_the_bits_as_they_are(whole, tmp_path, layout, seed):
    phases = (*PHASES, "sleep", "wake") if layout == "shared memory" else PHASES
    strikes = drawn_schedule(seed, ROLLOUT, phases, ITERATIONS)
    run = disturbed_run(tmp_path, strikes, *LONGER, *LAYOUTS[layout])
    assert_healed(run, whole(layout), ITERATIONS)
    assert run.strikes
    assert sum(row.get("fault/engine_restarts_count", 0) for row in run.rows) > 0


@pytest.mark.slow
@pytest.mark.parametrize("victim", ROLLOUT)
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("layout", ["two engines", "two engines and two senders", "shared memory"])
def test_an_engine_lost_between_two_buckets_of_weights(whole, tmp_path, victim, how, layout):
    """In the update before, in the middle of it, and right after it."""
    strikes = [Strike(victim, how, "weight_sync", 2 * index + 1, seconds) for index, seconds in enumerate((0, 0.9, 2))]
    small_buckets = ("weight_sync.bucket_bytes=1048576", SLOW_WEIGHTS)
    run = disturbed_run(tmp_path, strikes, *LONGER, *LAYOUTS[layout], *small_buckets)
    assert_healed(run, whole(layout), ITERATIONS)
    assert len(run.strikes) == 3


@pytest.mark.slow
@pytest.mark.parametrize("victim", ROLLOUT)
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("layout", ["two engines", "shared memory"])
def test_an_engine_that_came_back_is_lost_again_as_it_joins(whole, tmp_path, victim, how, layout):
    strikes = [Strike("scheduler", "kill", "rollout", 2, 0.1), Strike(victim, how, "join", 2)]
    run = disturbed_run(tmp_path, strikes, *LONGER, *LAYOUTS[layout], "deadlines.weight_sync_seconds=150")
    assert_healed(run, whole(layout), ITERATIONS)
    assert len(run.strikes) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        ("rollout.mode=one_step_off",),
        ("rollout.mode=async", "rollout.max_staleness=2"),
        ("rollout.oversampling=1.5", "rollout.partial=true"),
    ],
    ids=["one step off", "async", "partial"],
)
@pytest.mark.parametrize("layout", ["one engine", "two engines"])
def test_every_sample_is_trained_once_in_the_other_modes(tmp_path, mode, layout):
    strikes = [
        Strike("scheduler", "kill", "rollout", 1, 0.1),
        Strike("engine", "stop", "train", 2),
        Strike("engine", "kill", "weight_sync", 4),
        Strike("scheduler", "stop", "rollout", 5, 0.2),
    ]
    older = ("algorithm.old_policy=rollout", "algorithm.kl.coefficient=0")
    told = 'ray.environment={"SGLANG_FORCE_STREAM_INTERVAL": "8"}'
    run = disturbed_run(tmp_path, strikes, *LONGER, *LAYOUTS[layout], *mode, *older, told)
    assert_healed(run, None, ITERATIONS)
    assert len(run.strikes) == len(strikes)


@pytest.mark.slow
def test_an_engine_that_answers_wrongly_is_replaced(whole, tmp_path):
    trigger = tmp_path / "wrong-once"
    trigger.touch()
    told = f'ray.environment={{"RLPIPE_CHAOS_WRONG_ANSWER": "{trigger}"}}'
    run = disturbed_run(tmp_path, [], *LONGER, told)
    assert_healed(run, whole("one engine"), ITERATIONS)
    assert sum(row.get("fault/answers_refused_count", 0) for row in run.rows) == 1
    assert sum(row.get("fault/engine_restarts_count", 0) for row in run.rows) == 1


@pytest.mark.slow
@pytest.mark.parametrize("part", ["engine", "scheduler"])
def test_an_engine_that_hangs_while_its_processes_run_is_replaced_in_time(whole, tmp_path, part):
    trigger = tmp_path / "hang" / "once"
    trigger.parent.mkdir()
    trigger.touch()
    told = f'ray.environment={{"RLPIPE_CHAOS_HANGING_{part.upper()}": "{trigger}"}}'
    run = disturbed_run(tmp_path, [], *LONGER, told, "fault.engine_hang_seconds=15")
    assert_healed(run, whole("one engine"), ITERATIONS)
    (fault,) = run.faults
    assert "engine 0 hangs" in fault["reason"]
    assert 5 < fault["noticed"] - trigger.parent.stat().st_mtime < 60, run.evidence  # 15 since its last word


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "how", "layout"),
    random.Random(0).sample(list(itertools.product(ROLLOUT, SIGNALS, LAYOUTS)), 8),
)
def test_an_engine_lost_in_its_first_start_is_started_again(whole, tmp_path, victim, how, layout):
    """While it loads."""
    run = disturbed_run(tmp_path, [Strike(victim, how, "starting engines", None, 0.5)], *LONGER, *LAYOUTS[layout])
    assert_healed(run, whole(layout), ITERATIONS)
    assert len(run.faults) == len(run.strikes) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "how"), [("scheduler", "kill"), ("engine", "stop")])
def test_an_engine_lost_while_the_actor_is_built_beside_it(whole, tmp_path, victim, how):
    strikes = [Strike(victim, how, "starting the actor", None, 0.5)]
    run = disturbed_run(tmp_path, strikes, *LONGER, *SHARED_MEMORY, "ray.start=beside")
    assert_healed(run, whole("shared memory"), ITERATIONS)
    assert "the actor is built beside the engines" in run.output
    assert len(run.faults) == len(run.strikes) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("phase", ["rollout", "weight_sync"])
def test_all_engines_lost_at_once(whole, tmp_path, how, phase):
    strikes = [Strike("engine", how, phase, iteration, 0.1, which=None) for iteration in (2, 5)]
    run = disturbed_run(tmp_path, strikes, *LONGER, *TWO)
    assert_healed(run, whole("two engines"), ITERATIONS)
    assert len(run.strikes) == 4


@pytest.mark.slow
def test_the_failure_that_no_restart_is_left_for_ends_the_run_in_a_sentence(tmp_path):
    strikes = [Strike("scheduler", "kill", "rollout", iteration, 0.1) for iteration in (2, 3)]
    run = disturbed_run(tmp_path, strikes, *LONGER, "fault.engine_restarts=1")
    assert run.code == 2, run.evidence
    assert "error: no restart is left, fault.engine_restarts allows 1 within an hour: engine 0 died" in run.output
    assert "Traceback" not in run.output
