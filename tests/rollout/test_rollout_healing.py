"""Parts of healing: what is made again and how, which answers are refused, how many restarts are allowed."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rollout_requests import make_requests

from rlpipe.config.fault import FaultConfig
from rlpipe.config.rollout import EngineConfig
from rlpipe.shared.errors import DeadlineError, EngineFailure, RolloutError
from rlpipe.shared.sample import Status, VersionSpan
from rollout.answer_check import why_unusable
from rollout.arguments import EngineSetup, replacement
from rollout.engine_calls import FleetCalls
from rollout.fleet import EngineState, Fleet, RunningEngine
from rollout.healing import NewTokens
from rollout.partial_response import PartialResponse
from rollout.progress import Progress
from rollout.requests import Generation


def answer_to(request, token_ids=(5, 6, 7), logprobs=(-1.0, -2.0, 0.0), versions=None) -> Generation:
    versions = (VersionSpan(0, len(token_ids)),) if versions is None else versions
    return Generation(request.request_id, token_ids, logprobs, Status.COMPLETED, versions, 0, 0.1, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"status": Status.ABORTED, "token_ids": (), "logprobs": (), "versions": ()}, None),
        ({"logprobs": (-1.0, -2.0)}, "3 tokens and 2 log-probabilities"),
        ({"logprobs": (-1.0, math.nan, 0.0)}, "the log-probability nan"),
        ({"logprobs": (-1.0, 0.5, 0.0)}, "the log-probability 0.5"),
        ({"logprobs": (-1.7e308, -1.7e308, 0.0)}, "the log-probability -1.7e+308"),
        ({"token_ids": (5, -6, 7)}, "no token id"),
        ({"token_ids": (5, 6.0, 7)}, "no token id"),
        ({"token_ids": (), "logprobs": (), "versions": ()}, "no token"),
        ({"status": Status.FAILED}, "status"),
        ({"versions": (VersionSpan(0, 2),)}, "3 tokens, of which 2 have a weight version"),
    ],
)
def test_answers_that_cannot_be_used_are_told_from_those_that_can(change, reason):
    (request,) = make_requests(1)
    found = why_unusable(request, replace(answer_to(request), **change))
    assert found is None if reason is None else reason in found


def test_an_answer_has_to_go_on_from_what_was_begun_and_to_keep_the_limit():
    (request,) = make_requests(1, new_tokens=3)
    begun = replace(request, partial=PartialResponse((5, 6), (-1.0, -2.0), (VersionSpan(0, 2),)))
    assert why_unusable(begun, answer_to(begun)) is None
    assert "other tokens than those" in why_unusable(begun, answer_to(begun, token_ids=(5, 9, 7)))
    assert "3 are allowed" in why_unusable(request, answer_to(request, (5, 6, 7, 8), (-1.0,) * 4))


class _State:
    """What SGLang keeps of a request."""

    def __init__(self) -> None:
        self.output_ids: list[int] = []
        self.output_token_logprobs_val: list[float] = []

    def grow(self, *token_ids: int) -> None:
        self.output_ids += token_ids
        self.output_token_logprobs_val += [-float(token) for token in token_ids]


def test_pulses_tell_each_token_once_and_add_up_to_the_response():
    begun = PartialResponse((1, 2, 3), (-1.0, -2.0, -3.0), (VersionSpan(4, 1), VersionSpan(5, 2)))
    states = {"s": _State()}
    progress, known, told = Progress(states), PartialResponse(), 0
    with progress.of("r", "s", begun):
        for grown in ((), (4, 5), (), (6,)):
            states["s"].grow(*grown)
            pulse = progress.pulse(version=6, last_message=0.0)
            assert pulse.running == ("r",)
            told += sum(len(new.token_ids) for new in pulse.grown)
            for new in pulse.grown:
                known = new.after(known)
    assert told == 6
    assert known.token_ids == (1, 2, 3, 4, 5, 6)
    assert known.logprobs == tuple(-float(token) for token in known.token_ids)
    assert known.versions == (VersionSpan(4, 1), VersionSpan(5, 2), VersionSpan(6, 3))
    assert progress.pulse(6, 0.0).running == ()


def test_silence_is_counted_from_the_last_message_or_else_from_the_oldest_request(monkeypatch):
    progress, clock = Progress({}), [0.0]
    monkeypatch.setattr("rollout.progress.time.time", lambda: clock[0])
    assert progress.pulse(0, last_message=-50.0).silent_seconds == 0  # nothing is owed
    clock[0] = 100.0
    with progress.of("old", "s1", PartialResponse()):
        clock[0] = 103.0
        with progress.of("new", "s2", PartialResponse()):
            clock[0] = 110.0
            assert progress.pulse(0, last_message=90.0).silent_seconds == 10
            assert progress.pulse(0, last_message=107.0).silent_seconds == 3


def test_tokens_without_their_log_probabilities_are_not_told_yet():
    states = {"s": _State()}
    progress = Progress(states)
    with progress.of("r", "s", PartialResponse()):
        states["s"].output_ids = [1, 2]
        states["s"].output_token_logprobs_val = [-1.0]
        assert progress.pulse(0, 0.0).grown == ()
        states["s"].output_token_logprobs_val = [-1.0, -2.0]
        assert [new.token_ids for new in progress.pulse(0, 0.0).grown] == [(1, 2)]


def test_tokens_behind_a_gap_are_not_known_and_those_told_again_count_once():
    known = PartialResponse((1, 2), (-1.0, -2.0), (VersionSpan(0, 2),))
    assert NewTokens("r", 3, (9,), (-9.0,), 0).after(known) == known
    assert NewTokens("r", 1, (7, 8), (-7.0, -8.0), 1).after(known).token_ids == (1, 7, 8)


def test_an_engine_in_the_place_of_another_has_files_of_its_own(config_of):
    setup = EngineSetup(
        0, "model", "cpu", config_of().rollout.engine, 64, False, False, 0, "abce0", "/tmp/rlpipe-engine-abce0/a.log"
    )
    second = replacement(replacement(setup, awaits_weights=True), awaits_weights=True)
    assert (second.instance, second.restart, second.awaits_weights) == ("abce0r2", 2, True)
    assert second.log_path == "/tmp/rlpipe-engine-abce0r2/a.log"
    outside = replacement(replace(setup, log_path="runs/logs/a.log"), awaits_weights=False)
    assert outside.log_path == "runs/logs/a.log"


def test_restarts_are_counted_within_the_hour_and_a_loss_once(monkeypatch):
    fleet = Fleet([_engine(0), _engine(1)], FaultConfig(engine_restarts=2), lambda one, failure, why: failure)
    fleet.note_sent_weights()
    clock = [0.0]
    monkeypatch.setattr("rollout.fleet.time.monotonic", lambda: clock[0])
    told = []
    fleet.listen(lambda: told.append(len(fleet.serving())))
    for moment in (0.0, 10.0, 3605.0, 3609.0):
        assert fleet.end is None
        clock[0] = moment
        (lost,) = [one for one in fleet.all() if one.index == 0]
        for _ in range(2):
            fleet.report(lost, EngineFailure(f"lost at {moment}"))
        new = _engine(0)
        fleet.replace(lost, new)
        fleet.has_started(new, None)
        assert fleet.serve([new]) == [new]
    # Within the hour before the last one there were two, at 10 and at 3605 seconds.
    with pytest.raises(EngineFailure, match=r"lost at 3609"):
        fleet.check()
    assert told[:3] == [0, 0, 1]


def _losses(*fates, allowed=10):
    """Why a run ends one of whose two engines is lost again and again: before it is asked anything, silent after that,
    or after answers, its own or the other's."""
    engines = [_engine(0), _engine(1)]
    fleet = Fleet(engines, FaultConfig(engine_restarts=allowed), lambda one, failure, why: RolloutError(why))
    for fate in fates:
        lost, other = fleet.all()
        lost.asked = fate != "idle"
        if fate in ("useful", "helped"):
            fleet.note_answer(lost if fate == "useful" else other)
        fleet.report(lost, EngineFailure("lost"))
        fleet.replace(lost, _engine(0))
    return None if fleet.end is None else str(fleet.end)


def test_engines_that_die_of_what_they_are_asked_end_the_run_before_the_last_restart():
    silent = "silent"
    assert _losses(silent, silent, silent, silent).startswith("4 engines in a row were lost before any answered")
    assert _losses(silent, silent, silent, "useful", silent, silent, silent) is None
    assert _losses(silent, silent, silent, "helped", silent, silent) is None
    assert _losses(silent, "idle", "idle", silent, "idle", silent) is None  # lost by something else: proves nothing
    assert _losses(silent, "idle", silent, silent, silent).startswith("4 engines in a row")
    assert _losses(silent, silent, allowed=1) == "no restart is left, fault.engine_restarts allows 1 within an hour"


def test_an_engine_that_starts_while_weights_are_sent_awaits_them():
    """Launched before with weights of the model's folder, perhaps when no other engine was there to receive any."""
    early, late = _engine(0), _engine(1)
    fleet = Fleet([early, late], FaultConfig(), lambda one, failure, why: failure)
    fleet.has_started(early, None)
    fleet.note_sent_weights()
    fleet.has_started(late, None)
    assert (early.state, late.state) == (EngineState.SERVING, EngineState.AWAITING_WEIGHTS)
    assert fleet.up() == [early, late] and fleet.awaiting_weights() == [late]


def test_an_engine_of_a_restarted_run_awaits_weights_and_a_lost_one_is_not_there_again():
    waiting, lost = _engine(0), _engine(1)
    waiting.setup = replace(waiting.setup, awaits_weights=True)
    fleet = Fleet([waiting, lost], FaultConfig(), lambda one, failure, why: failure)
    fleet.report(lost, EngineFailure("lost in its start"))
    for one in (waiting, lost):
        fleet.has_started(one, None)
    assert (waiting.state, lost.state) == (EngineState.AWAITING_WEIGHTS, EngineState.LOST)


def _engine(index: int) -> RunningEngine:
    class Silent:
        """Stands for an actor: the fleet asks it for nothing but these three."""

        class address:
            remote = staticmethod(lambda *arguments: None)

        start = room_beside_bytes = address

    setup = EngineSetup(index, "m", "cpu", EngineConfig(), 64, False, False, 0, f"abce{index}", "log")
    return RunningEngine(setup, Silent)


def _called(monkeypatch, answers):
    """Two engines, and the calls to both, which are answered so."""
    engines = [_engine(0), _engine(1)]
    fleet = Fleet(engines, FaultConfig(), lambda one, failure, why: failure)
    for engine in engines:
        fleet.has_started(engine, None)
        engine.actor = SimpleNamespace(wake=SimpleNamespace(remote=lambda: None))
    calls = FleetCalls(fleet)
    monkeypatch.setattr(calls, "_answers", lambda *given: iter(zip(engines, answers, strict=True)))
    return engines, calls


@pytest.mark.parametrize("failure", [EngineFailure("died"), DeadlineError("late")])
def test_an_engine_that_fails_or_is_late_is_lost_and_the_others_answers_count(monkeypatch, failure):
    engines, calls = _called(monkeypatch, [failure, 5])
    assert calls.to_all("wake", seconds=1, phase="waking") == [5]
    assert [one.is_lost for one in engines] == [True, False] and str(engines[0].failure) == str(failure)


def test_what_an_engine_refuses_is_an_error_and_no_loss(monkeypatch):
    engines, calls = _called(monkeypatch, [5, RolloutError("refused")])
    with pytest.raises(RolloutError, match="refused"):
        calls.to_all("wake", seconds=1, phase="waking")
    assert not any(one.is_lost for one in engines)
