"""When engines are found to hang, by the settings of their health probes; on a clock that the test moves."""

import threading
import time
from types import SimpleNamespace

import pytest

from rlpipe.config.fault import FaultConfig
from rlpipe.config.rollout import EngineConfig
from rlpipe.shared.errors import DiskFullError, EngineFailure, RolloutError
from rollout import supervisor
from rollout.arguments import EngineSetup
from rollout.fleet import EngineState, Fleet, RunningEngine
from rollout.healing import Fault, NewTokens, Pulse
from rollout.supervisor import Supervisor, _Probes

NEVER = 1e9
_TICKS_PER_SECOND = 10


class _Watched:
    """A serving engine for `seconds`. after_seconds: how long the answer to a probe takes that was sent at a moment;
    silent_seconds: for how long SGLang has said nothing, as a pulse that comes at a moment tells."""

    def __init__(self, monkeypatch, seconds, after_seconds, silent_seconds=lambda now: 0.0, stopped=False, **fault):
        self.now, self.sent_at, self.looked_at = 0.0, [], []
        actor = SimpleNamespace(address=_calls(None), room_beside_bytes=_calls(None), start=_calls(None))
        actor.probe = SimpleNamespace(remote=self._sent)
        setup = EngineSetup(0, "m", "cpu", EngineConfig(), 64, False, False, 0, "abce0", "log")
        self.engine = RunningEngine(setup, actor, state=EngineState.SERVING)
        _replace_here(monkeypatch, supervisor.time, "monotonic", lambda: self.now)
        _replace_here(monkeypatch, supervisor, "_is_ready", lambda sent: self.now >= sent + after_seconds(sent))
        _replace_here(monkeypatch, supervisor.ray, "get", lambda sent: Pulse(silent_seconds(self.now), (), ()))
        fleet = Fleet([self.engine], FaultConfig(), lambda _engine, failure, _why: failure)
        watch = Supervisor(fleet, None, FaultConfig(**fault), 60.0, lambda line: None, lambda fault: None)
        monkeypatch.setattr(watch, "_is_stopped", lambda engine: self.looked_at.append(round(self.now, 1)) or stopped)
        for tick in range(1, seconds * _TICKS_PER_SECOND + 1):
            self.now = tick / _TICKS_PER_SECOND
            watch._look_at(self.engine)
            if self.engine.state is EngineState.LOST:
                break

    def _sent(self):
        self.sent_at.append(self.now)
        return self.now

    @property
    def is_lost(self):
        return self.engine.state is EngineState.LOST

    @property
    def lost_at(self):
        """When, and why."""
        assert self.is_lost
        return round(self.now, 1), str(self.engine.failure)


def _replace_here(monkeypatch, owner, name, replacement):
    """For this thread alone: engines of other tests in this process have supervisors of their own, in theirs."""
    original, here = getattr(owner, name), threading.get_ident()

    def chosen(*arguments, **options):
        function = replacement if threading.get_ident() == here else original
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, chosen)


def _calls(value):
    return SimpleNamespace(remote=lambda *arguments: value)


@pytest.mark.parametrize(("every_seconds", "count"), [(1.0, 20), (2.5, 8)])
def test_probes_are_sent_as_often_as_is_said(monkeypatch, every_seconds, count):
    watched = _Watched(monkeypatch, 20, lambda sent: 0.0, engine_probe_seconds=every_seconds)
    assert abs(len(watched.sent_at) - count) <= 1
    assert not watched.is_lost and watched.looked_at == []


@pytest.mark.parametrize(("deadline_seconds", "is_late"), [(2.0, True), (3.5, False)])
def test_an_answer_within_the_deadline_is_not_missed(monkeypatch, deadline_seconds, is_late):
    watched = _Watched(monkeypatch, 20, lambda sent: 3.0, engine_probe_deadline_seconds=deadline_seconds)
    assert bool(watched.looked_at) == is_late
    assert not watched.is_lost  # it answers, though slowly, and its processes run


@pytest.mark.parametrize(("missed", "of"), [(2, 5), (3, 5), (2, 4), (2, 3), (1, 2)])
def test_an_engine_is_looked_at_when_it_missed_so_many_of_its_last_probes(monkeypatch, missed, of):
    """Every other answer is late. Answers are taken in the order of the probes, those before a late one with it."""
    late = lambda sent: 2.2 if round(sent) % 2 else 0.0  # noqa: E731
    watched = _Watched(monkeypatch, 40, late, engine_missed_probes=missed, engine_probes=of)
    assert bool(watched.looked_at) == (missed <= of // 2)


@pytest.mark.parametrize("hang_seconds", [8.0, 15.0])
def test_an_engine_without_an_answer_is_lost_at_once_where_it_is_stopped_and_else_in_time(monkeypatch, hang_seconds):
    silent = lambda sent: NEVER if sent > 5 else 0.0  # noqa: E731
    seconds, reason = _Watched(monkeypatch, 60, silent, engine_hang_seconds=hang_seconds).lost_at
    assert hang_seconds <= seconds - 4 <= hang_seconds + 3 and "has not answered a health probe for" in reason
    seconds, reason = _Watched(monkeypatch, 60, silent, stopped=True, engine_hang_seconds=hang_seconds).lost_at
    assert seconds - 5 <= 6 and reason.endswith("and a process of it is stopped")


@pytest.mark.parametrize("hang_seconds", [8.0, 15.0])
def test_an_engine_whose_processes_say_nothing_is_lost_though_it_answers_probes(monkeypatch, hang_seconds):
    silence = lambda now: max(0.0, now - 5)  # noqa: E731
    watched = _Watched(monkeypatch, 60, lambda sent: 0.1, silence, engine_hang_seconds=hang_seconds)
    seconds, reason = watched.lost_at
    assert hang_seconds <= seconds - 5 <= hang_seconds + 2 and "answered nothing for" in reason


def _engine(index=0, state=EngineState.STARTING, setup=None):
    actor = SimpleNamespace(**dict.fromkeys(("address", "room_beside_bytes", "start", "probe"), _calls(None)))
    setup = setup or EngineSetup(index, "m", "cpu", EngineConfig(), 64, False, False, 0, f"abce{index}", "log")
    return RunningEngine(setup, actor, state=state)


def _supervised(monkeypatch, engines, on_fault=lambda fault: None, **fault):
    """A fleet and what supervises it, whose looks the test makes; what ends an engine does nothing."""
    _replace_here(monkeypatch, supervisor.ray, "kill", lambda actor: None)
    _replace_here(monkeypatch, supervisor, "_is_ready", lambda reference: False)
    fleet = Fleet(engines, FaultConfig(**fault), lambda _engine, failure, _why: failure)
    fleet.note_sent_weights()
    starter = SimpleNamespace(launch=lambda setup: _engine(setup=setup))
    return fleet, Supervisor(fleet, starter, FaultConfig(**fault), 5.0, lambda line: None, on_fault)


def test_no_engine_is_started_while_restarts_are_paused(monkeypatch):
    fleet, watch = _supervised(monkeypatch, [_engine(state=EngineState.SERVING)])
    (lost,) = fleet.all()
    fleet.report(lost, EngineFailure("lost"))
    watch.pause_restarts()
    watch._look_at(lost)
    assert fleet.all() == [lost]
    watch.resume_restarts()
    watch._look_at(lost)
    assert fleet.all()[0].state is EngineState.STARTING


def test_restarts_are_paused_once_no_engine_is_starting(monkeypatch):
    fleet, watch = _supervised(monkeypatch, [_engine()])
    (starting,) = fleet.all()
    threading.Timer(0.2, fleet.has_started, (starting, None)).start()
    watch.pause_restarts()
    assert starting.state is EngineState.AWAITING_WEIGHTS


def test_an_engine_that_nobody_follows_any_more_is_not_waited_for(monkeypatch):
    """Else a run that ends saves nothing before it would have had to start."""
    engines = [_engine(0), _engine(1, EngineState.SERVING)]
    fleet, watch = _supervised(monkeypatch, engines, engine_restarts=0)
    fleet.report(engines[1], EngineFailure("lost"))
    begin = time.monotonic()
    watch.pause_restarts()
    assert time.monotonic() - begin < 3


def test_healing_takes_from_the_first_loss_until_an_engine_serves(monkeypatch):
    """The second engine is lost in its start, after 10 seconds."""
    now, told = 100.0, []
    for clock in ("time", "monotonic"):
        _replace_here(monkeypatch, supervisor.time, clock, lambda: now)
    fleet, watch = _supervised(monkeypatch, [_engine(state=EngineState.SERVING)], told.append)
    for moment in (100.0, 110.0):
        now = moment
        (lost,) = fleet.all()
        fleet.report(lost, EngineFailure(f"lost at {moment:.0f}"))
        watch._look_at(lost)
    now = 130.0
    watch._has_started(fleet.all()[0], None)
    now = 150.0
    fleet.serve(fleet.all())
    for _ in range(2):
        watch._look_at(fleet.all()[0])
    assert told == [Fault(0, "lost at 100", 100.0, 130.0, 150.0)]
    assert fleet.counts.take() == {"engine_restarts": 2, "healing_seconds": 50.0}


def test_what_pulses_tell_is_known_as_long_as_its_request_runs(monkeypatch):
    _replace_here(monkeypatch, supervisor.ray, "get", lambda pulse: pulse)
    fleet, watch = _supervised(monkeypatch, [_engine(state=EngineState.SERVING)])
    (engine,) = fleet.all()
    pulses = [Pulse(0.0, ("a",), ()), Pulse(0.0, ("a", "b"), (NewTokens("a", 0, (5, 6), (-1.0, -2.0), 3),))]
    found = []
    for pulse in (*pulses, Pulse(0.0, ("b",), ())):
        watch._take_pulse(engine, _Probes(FaultConfig()), pulse, 0.0)
        found.append((engine.answered, {name: one.token_ids for name, one in engine.progress.items()}))
    assert found == [(False, {}), (True, {"a": (5, 6)}), (True, {})]


@pytest.mark.parametrize(
    ("has_started", "failure", "ends"),
    [
        (False, RolloutError("no memory"), True),  # it would say so again
        (False, EngineFailure("killed"), False),
        (True, RolloutError("no memory"), False),
        (True, DiskFullError("full"), True),
    ],
)
def test_an_engine_that_does_not_start_ends_the_run_where_another_would_not_either(
    monkeypatch, has_started, failure, ends
):
    fleet, watch = _supervised(monkeypatch, [_engine()])
    if has_started:
        watch._has_started(fleet.all()[0], None)
        fleet.replace(fleet.all()[0], _engine())
    watch._start_failed(fleet.all()[0], failure)
    assert (fleet.end is failure, fleet.all()[0].is_lost) == (ends, not ends)
