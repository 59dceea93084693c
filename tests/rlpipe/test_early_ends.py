"""How a run goes on without its actor, and what is saved when it is ended early."""

from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest

from rlpipe.config.fault import FaultConfig
from rlpipe.monitoring.console import Console
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.monitoring.trackers import Trackers
from rlpipe.shared.errors import ActorLostError, RolloutError
from rlpipe.training.actor_restarts import actor_attempts
from rlpipe.training.checkpoints import Checkpoints, RunState
from rlpipe.training.iteration import IterationLog
from rlpipe.training.session import Session
from rlpipe.training.sft import SupervisedSession
from tests.small_config import small_config


def _checkpoints(folder, grace_seconds=5.0, answering=True):
    """Of a run whose third iteration is whole, and the iterations that are saved."""
    run, found = {"name": "r", "iterations": 9, "directory": str(folder)}, []
    config = small_config(run=run, fault={"grace_seconds": grace_seconds})
    actor = SimpleNamespace(
        answering=answering,
        save_checkpoint=lambda folder, iteration, state: found.append(iteration),
        finish_checkpoint=lambda: None,
    )
    start = RunState(iteration=3)
    return Checkpoints(config, RunDirectory.of(config), actor, nullcontext, Console(9), start, loaded=None), found


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_lost_actor_is_started_again_as_often_as_is_allowed(restarts):
    tries = []
    with suppress(ActorLostError):
        for attempt in actor_attempts(FaultConfig(actor_restarts=restarts), Console(2)):
            with attempt:
                tries.append(attempt.retry_state.attempt_number)
                raise ActorLostError("lost")
    assert len(tries) == restarts + 1


@pytest.mark.parametrize(
    ("grace_seconds", "error", "saved"),
    [
        (5.0, RolloutError("x"), [3]),
        (5.0, KeyboardInterrupt(), [3]),
        (0.0, RolloutError("x"), []),
        (5.0, ActorLostError("x"), []),
    ],
)
def test_what_is_whole_is_saved_before_an_early_end_where_there_is_time(tmp_path, grace_seconds, error, saved):
    checkpoints, found = _checkpoints(tmp_path, grace_seconds)
    with pytest.raises(type(error)), checkpoints.saved_before_early_end():
        raise error
    assert found == saved


@pytest.mark.parametrize(("error", "saved"), [(RolloutError("x"), []), (KeyboardInterrupt(), [3])])
def test_an_actor_whose_call_failed_is_not_asked_to_save_and_one_that_was_interrupted_is(tmp_path, error, saved):
    checkpoints, found = _checkpoints(tmp_path, answering=False)
    with pytest.raises(type(error)), checkpoints.saved_before_early_end():
        raise error
    assert found == saved


def test_what_may_be_in_the_way_of_a_save_is_ended_before_it(tmp_path):
    checkpoints, found = _checkpoints(tmp_path)
    with pytest.raises(RolloutError), checkpoints.saved_before_early_end(lambda: found.append("interrupted")):
        raise RolloutError("x")
    assert found == ["interrupted", 3]


def test_a_state_tells_which_data_its_position_belongs_to():
    at, lengths = SimpleNamespace(epoch=1, position=5), SimpleNamespace(state=dict)
    rollouts = SimpleNamespace(position=lambda: (at, [7]), lengths=lengths)
    run = SimpleNamespace(rollouts=rollouts, prompt_set=SimpleNamespace(fingerprint="these"))
    assert Session._state(run, 2) == RunState(2, 1, 5, [7], "these", {})
    supervised = SimpleNamespace(stream=SimpleNamespace(state=at), examples=SimpleNamespace(fingerprint="those"))
    assert SupervisedSession.state(supervised, 2) == RunState(2, 1, 5, data="those")


def test_nothing_is_saved_between_an_update_of_the_policy_and_the_end_of_its_iteration(tmp_path):
    checkpoints, found = _checkpoints(tmp_path)
    checkpoints.commit(SimpleNamespace(finish_despite_signals=lambda seconds: None))
    with pytest.raises(RolloutError), checkpoints.saved_before_early_end():
        raise RolloutError("x")
    assert found == []


def test_what_the_last_iteration_left_is_what_an_early_end_saves(tmp_path):
    checkpoints, found = _checkpoints(tmp_path)
    log = IterationLog(Trackers([]), Console(9), devices=1)
    with checkpoints.iteration(log, 4, lambda number: RunState(iteration=number)) as record:
        checkpoints.commit(record)
    with pytest.raises(RolloutError), checkpoints.saved_before_early_end():
        raise RolloutError("x")
    assert found == [4]
