"""The client's own bookkeeping, with engines that are no processes: what waits goes out as answers come in."""

import asyncio
from types import SimpleNamespace

import pytest

from rlpipe.config.fault import FaultConfig
from rlpipe.config.root import Config
from rlpipe.shared.errors import EngineFailure, RolloutError
from rlpipe.shared.sample import Status, VersionSpan
from rollout.client import EngineClient
from rollout.fleet import EngineState, Fleet, RunningEngine
from rollout.migration import Pace, Running
from rollout.partial_response import PartialResponse
from rollout.pool import _QUEUE_SHARE, RolloutPool
from rollout.requests import GenerateRequest, Generation, SamplingParameters


class _StandIn:
    """Answers one request after another, each in a turn of the loop of its own, and knows how many it had at most."""

    def __init__(self, index: int) -> None:
        self.index, self.held, self.most = index, 0, 0
        self.generate = SimpleNamespace(remote=self._answers)
        self.address = self.start = self.room_beside_bytes = SimpleNamespace(remote=lambda *given: None)

    async def _answers(self, batch):
        self.held += len(batch)
        self.most = max(self.most, self.held)
        for request in batch:
            yield self._answer(request)

    async def _answer(self, request):
        await asyncio.sleep(0)
        self.held -= 1
        spans = (VersionSpan(1, 2),)
        return [Generation(request.request_id, (7, 8), (-1.0, -2.0), Status.COMPLETED, spans, self.index, 0.1, 0)]


def _client(engines, requests_per_engine):
    actors = [_StandIn(index) for index in range(engines)]
    running = [
        RunningEngine(SimpleNamespace(index=actor.index, log_path=""), actor, state=EngineState.SERVING)
        for actor in actors
    ]
    fleet = Fleet(running, FaultConfig(), lambda _engine, failure, _why: failure)
    return actors, EngineClient(fleet, requests_per_engine, keep_tokens=False)


@pytest.mark.parametrize("engines", [1, 3])
def test_every_request_is_answered_although_engines_have_room_for_few(engines):
    actors, client = _client(engines, requests_per_engine=4)
    requests = [GenerateRequest(str(number), (1, 2), SamplingParameters(8), number) for number in range(200)]

    async def all_answers(part):
        return await asyncio.wait_for(asyncio.gather(*map(client.generate, part)), 60)

    async def in_two_parts():
        return [*await all_answers(requests[:150]), *await all_answers(requests[150:])]

    answers = asyncio.run(in_two_parts())
    client.close()
    assert [one.request_id for one in answers] == [one.request_id for one in requests]
    assert [actor.most for actor in actors] == [4] * engines
    assert client.busy_engines() == []


def _asked_of_a_client(monkeypatch, config):
    """What a pool of `config` gives its client."""
    monkeypatch.setattr("rollout.pool.EngineClient", lambda *given, **named: (given[1:], named))
    fleet = Fleet([], FaultConfig(), lambda _engine, failure, _why: failure)
    pool = SimpleNamespace(_config=config, _fleet=fleet)
    pool._requests_per_engine = lambda: RolloutPool._requests_per_engine(pool)
    return RolloutPool.client(pool)


def test_requests_are_sent_as_the_rollout_says(monkeypatch, config_of):
    usual = config_of(max_running_requests=16, deterministic=False)
    named = {"follow_prefixes": True, "longest_first": True, "migrates": False}
    assert _asked_of_a_client(monkeypatch, usual) == ((int(16 * _QUEUE_SHARE) + 1, True), named)
    other = {"request_routing": "least_loaded", "request_order": "arrival", "migration": True}
    config = Config.model_validate(usual.model_dump() | {"rollout": usual.rollout.model_dump() | other})
    assert _asked_of_a_client(monkeypatch, config)[1] == {name: not value for name, value in named.items()}


@pytest.mark.parametrize(
    ("mode", "deterministic", "replay", "kept"),
    [
        ("sync", True, False, False),  # a response that begins anew gets the same bits
        ("sync", False, False, True),
        ("async", True, False, True),
        ("sync", False, True, False),  # its routes would miss those of the tokens that are kept
    ],
)
def test_tokens_of_a_lost_engine_are_kept_where_others_would_come(
    monkeypatch, config_of, mode, deterministic, replay, kept
):
    config = config_of(deterministic=deterministic, algorithm={"routing_replay": replay})
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"mode": mode})})
    (_, keeps), _ = _asked_of_a_client(monkeypatch, config)
    assert keeps == kept


class _Told:
    """Answers what the test says, or, aborted, all that it owes with what was partial."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.asked: dict[str, GenerateRequest] = {}
        self._answers: asyncio.Queue[Generation] = asyncio.Queue()
        self.generate = SimpleNamespace(remote=self._stream)
        self.abort = SimpleNamespace(remote=self._abort)
        self.release = SimpleNamespace(remote=self._release)
        self.released: list[str] = []
        self.address = self.start = self.room_beside_bytes = SimpleNamespace(remote=lambda *given: None)

    async def _stream(self, batch):
        self.asked |= {request.request_id: request for request in batch}
        for _ in batch:
            yield self._listed(await self._answers.get())

    async def _listed(self, answer):
        return [answer]

    async def _abort(self):
        for name in list(self.asked):
            self.answer(name, self.asked[name].partial.token_ids, Status.ABORTED)

    async def _release(self, names):
        self.released += names

    def answer(self, name, token_ids, status=Status.COMPLETED):
        self._answers.put_nowait(_generation(self.asked.pop(name).request_id, token_ids, status, self.index))


def _generation(name, token_ids, status=Status.COMPLETED, engine=0):
    tokens = len(token_ids)
    return Generation(name, token_ids, (-1.0,) * tokens, status, (VersionSpan(1, tokens),), engine, 0.1, 0)


def _partial(tokens: int) -> PartialResponse:
    return PartialResponse(tuple(range(tokens)), (-1.0,) * tokens, (VersionSpan(1, tokens),))


def _asked_for(name="a", tokens=0, stop=(), **more) -> GenerateRequest:
    return GenerateRequest(name, (1, 2), SamplingParameters(20, stop=stop), 0, partial=_partial(tokens), **more)


def _with_engines(script, engines=2, requests_per_engine=8, keep_tokens=True, fault=FaultConfig()):
    """What `script` returns, given the engines, their fleet and a client."""
    actors = [_Told(index) for index in range(engines)]
    running = [
        RunningEngine(SimpleNamespace(index=actor.index, log_path="log"), actor, state=EngineState.SERVING)
        for actor in actors
    ]
    fleet = Fleet(running, fault, lambda _engine, failure, _why: failure)
    client = EngineClient(fleet, requests_per_engine, keep_tokens, follow_prefixes=False)
    try:
        return asyncio.run(asyncio.wait_for(script(actors, fleet, client), 60))
    finally:
        client.close()


async def _begun(client, *requests):
    """Their answers, once engines have all that they take."""
    asked = [asyncio.ensure_future(client.generate(request)) for request in requests]
    await _turns()
    return asked


async def _turns():
    for _ in range(10):
        await asyncio.sleep(0)


def test_an_abort_answers_what_waits_and_what_runs_with_what_there_is():
    async def script(actors, fleet, client):
        answers = await _begun(client, _asked_for("runs", 3), _asked_for("waits", 2))
        await client.abort()
        assert client.busy_engines() == []
        return [await answer for answer in answers]

    runs, waits = _with_engines(script, engines=1, requests_per_engine=1)
    assert [(one.request_id, one.token_ids, one.engine) for one in (runs, waits)] == [
        ("runs", (0, 1, 2), 0),
        ("waits", (0, 1), -1),
    ]
    assert {runs.status, waits.status} == {Status.ABORTED}


def test_what_a_lost_engine_owes_is_aborted_too():
    async def script(actors, fleet, client):
        (answer,) = await _begun(client, _asked_for("a", 3))
        actors[0].abort = SimpleNamespace(remote=_never)
        aborting = asyncio.ensure_future(client.abort())
        await _turns()
        fleet.report(fleet.all()[0], EngineFailure("gone"))
        found = await answer
        aborting.cancel()
        return found, actors[1].asked

    async def _never():
        await asyncio.sleep(600)

    found, asked = _with_engines(script)
    assert (found.status, found.token_ids, asked) == (Status.ABORTED, (0, 1, 2), {})


def test_the_first_failure_is_the_error_of_all_requests_that_run_and_that_follow():
    async def script(actors, fleet, client):
        answers = await _begun(client, _asked_for("a"), _asked_for("b"))
        fleet.give_up(RolloutError("first"))
        fleet.give_up(RolloutError("second"))
        await _turns()
        return [await _error(one) for one in (*answers, client.generate(_asked_for("c")))]

    async def _error(answer):
        with pytest.raises(RolloutError) as caught:
            await answer
        return str(caught.value)

    assert _with_engines(script) == ["first"] * 3


@pytest.mark.parametrize(
    ("keep_tokens", "begun", "told", "stop", "again", "lost"),
    [
        (True, 0, 5, (), 5, 0),
        (True, 0, 5, ("ab", "c"), 3, 2),  # a stop string may lie across the interruption
        (True, 4, 5, ("ab",), 4, 1),  # as much as was begun stays
        (True, 4, None, (), 4, 0),
        (True, 4, 2, (), 4, 0),
        (False, 0, 5, (), 0, 5),
        (False, 2, 5, (), 2, 3),
    ],
)
def test_requests_of_a_lost_engine_go_on_elsewhere_from_what_is_kept(keep_tokens, begun, told, stop, again, lost):
    async def script(actors, fleet, client):
        (answer,) = await _begun(client, _asked_for("a", begun, stop))
        engine = fleet.all()[0]
        if told is not None:
            engine.progress["a"] = _partial(told)
        fleet.report(engine, EngineFailure("gone"))
        await _turns()
        asked = actors[1].asked["a"].partial
        client._receive(engine, _generation("a", (9,)))  # on its way when it was given up
        assert not answer.done()
        actors[1].answer("a", tuple(range(8)))
        return asked, fleet.counts.take(), fleet.counts.take(), await answer

    asked, counts, later, answer = _with_engines(script, keep_tokens=keep_tokens)
    assert asked == _partial(again)
    assert (counts["requests_reissued"], counts["tokens_lost"], later) == (1, lost, {})
    assert (answer.engine, len(answer.token_ids)) == (1, 8)


def test_an_answer_that_cannot_be_used_is_counted_and_asked_of_another_engine():
    async def script(actors, fleet, client):
        (answer,) = await _begun(client, _asked_for("a", 3))
        actors[0].answer("a", (7, 7, 7, 7))  # not what it was to go on from
        await _turns()
        actors[1].answer("a", (0, 1, 2, 3))
        return fleet.counts.take(), fleet.all()[0], await answer

    counts, refused, answer = _with_engines(script)
    assert (counts["answers_refused"], counts["requests_reissued"], refused.is_lost) == (1, 1, True)
    assert str(refused.failure) == (
        "engine 0 answered request 'a' with other tokens than those that it was to go on from; log: log"
    )
    assert answer.token_ids == (0, 1, 2, 3)


def test_nothing_is_sent_while_requests_are_paused():
    async def script(actors, fleet, client):
        fleet.pause_requests(True)
        (answer,) = await _begun(client, _asked_for())
        assert not actors[0].asked
        fleet.pause_requests(False)
        await _turns()
        actors[0].answer("a", (5,))
        assert not fleet.all()[0].answered
        await answer
        assert fleet.all()[0].answered
        return await answer

    assert _with_engines(script, engines=1).token_ids == (5,)


def test_spans_tell_what_an_engine_wrote_for_a_conversation_and_leave_urgent_ones_out():
    async def script(actors, fleet, client):
        turn = _asked_for("c.1", 2, conversation_id="c")
        answers = await _begun(client, turn, _asked_for("alone"), _asked_for("urgent", urgent=True))
        for name, tokens in (("c.1", 6), ("alone", 4), ("urgent", 3)):
            actors[0].answer(name, tuple(range(tokens)))
        await asyncio.gather(*answers)
        return client.take_spans(), client.take_spans()

    spans, later = _with_engines(script, engines=1)
    assert [(one.response, one.engine, one.tokens) for one in spans] == [("c", 0, 4), ("alone", 0, 4)]
    assert all(one.begin < one.end for one in spans) and later == []


def test_what_engines_write_is_seen_as_it_will_be_when_moves_have_ended():
    """Told tokens count, and those that are begun; expectations count from there, and what has none is expected to
    double; the limit is one; what has moved, or is leaving for another engine, stays there."""

    async def script(actors, fleet, client):
        requests = [
            _asked_for("told", 2, expected_tokens=9),
            _asked_for("begun", 6, expected_tokens=4),
            _asked_for("unknown"),
            _asked_for("moved", expected_tokens=5),
            _asked_for("leaves", 3, expected_tokens=30),
        ]
        answers = await _begun(client, *requests)
        first, second = fleet.all()
        client._owners = dict.fromkeys((one.request_id for one in requests), first)
        first.progress |= {"told": _partial(5), "begun": _partial(1), "unknown": _partial(4)}
        client._moved["moved"] = _generation("moved", ())
        client._leaving["leaves"] = 1
        found = client._running({0: first, 1: second})
        for answer in answers:
            answer.cancel()
        return found, client._running({1: second})

    found, without_owner = _with_engines(script)
    assert found == {
        0: [
            Running("told", 6, 2 + 5),
            Running("begun", 4, 2 + 6),
            Running("unknown", 4, 2 + 4),
            Running("moved", 5, 2, stays=True),
        ],
        1: [Running("leaves", 17, 2 + 3, stays=True)],
    }
    assert without_owner == {1: []}


@pytest.mark.parametrize(
    ("pace", "aborting", "waiting", "moved"),
    [
        (Pace(1.0, 1.0), False, 0, ["20", "30"]),
        (None, False, 0, []),
        (Pace(1.0, 1.0), True, 0, []),
        (Pace(1.0, 1.0), False, 1, []),  # an engine that has room gets what waits
    ],
)
def test_responses_move_where_it_is_known_to_be_worth_it_and_nothing_else_is_going_on(pace, aborting, waiting, moved):
    async def script(actors, fleet, client):
        names = ("1000", "40", "30", "20")
        requests = [
            GenerateRequest(name, (1,), SamplingParameters(8000), 0, expected_tokens=int(name)) for name in names
        ]
        answers = await _begun(client, *requests, *[_asked_for(f"waits {one}") for one in range(waiting)])
        client._owners = dict.fromkeys(names, fleet.all()[0])
        client._pace, client._aborting = pace, aborting
        client._migrate()
        await _turns()
        for answer in answers:
            answer.cancel()
        assert dict.fromkeys(moved, 1) == client._leaving
        return actors[0].released

    assert _with_engines(script, requests_per_engine=2) == moved


@pytest.mark.parametrize(
    ("status", "aborting", "moves"),
    [(Status.ABORTED, False, True), (Status.COMPLETED, False, False), (Status.ABORTED, True, False)],
)
def test_what_is_to_move_moves_unless_it_has_ended_or_all_end(status, aborting, moves):
    async def script(actors, fleet, client):
        (answer,) = await _begun(client, _asked_for())
        client._leaving["a"] = 1
        client._aborting = aborting
        actors[0].answer("a", (4, 5), status)
        await _turns()
        if moves:
            assert actors[1].asked["a"].partial.token_ids == (4, 5)
            actors[1].answer("a", (4, 5, 6))
        return await answer, client.busy_engines()

    answer, busy = _with_engines(script)
    assert (answer.engine, answer.token_ids, busy) == ((1, (4, 5, 6), []) if moves else (0, (4, 5), []))


def test_a_move_to_nowhere_is_forgotten_with_the_engine_that_was_to_hand_on():
    async def script(actors, fleet, client):
        (answer,) = await _begun(client, _asked_for())
        client._leaving["a"] = 1
        fleet.report(fleet.all()[0], EngineFailure("gone"))
        await _turns()
        actors[1].answer("a", (4,), Status.ABORTED)  # by whoever asked, and not to go on elsewhere
        return await answer

    assert _with_engines(script).status is Status.ABORTED


def test_a_response_that_moved_goes_on_from_there_when_its_second_engine_is_lost_too():
    async def script(actors, fleet, client):
        (answer,) = await _begun(client, _asked_for())
        client._leaving["a"] = 1
        actors[0].answer("a", (4, 5), Status.ABORTED)
        await _turns()
        fleet.report(fleet.all()[1], EngineFailure("gone"))
        await _turns()
        answer.cancel()
        return actors[0].asked["a"].partial.token_ids

    assert _with_engines(script) == (4, 5)


def test_work_of_the_engine_that_a_response_left_is_counted_once():
    """The same request may be made again later."""

    async def script(actors, fleet, client):
        (moved,) = await _begun(client, _asked_for())
        client._leaving["a"] = 1
        actors[0].answer("a", (4, 5), Status.ABORTED)
        await _turns()
        actors[1].answer("a", (4, 5, 6))
        await moved
        (again,) = await _begun(client, _asked_for())
        actors[0].answer("a", (4,))
        return (await moved).seconds, (await again).seconds

    assert _with_engines(script) == (0.2, 0.1)


def test_what_is_asked_after_an_abort_is_answered_though_its_engine_is_lost():
    async def script(actors, fleet, client):
        await _begun(client, _asked_for("before"))
        await client.abort()
        (answer,) = await _begun(client, _asked_for("after"))
        fleet.report(fleet.all()[0], EngineFailure("gone"))
        await _turns()
        assert not answer.done()
        actors[1].answer("after", (4,))
        return await answer

    assert _with_engines(script).status is Status.COMPLETED


def test_an_abort_does_not_wait_for_an_engine_that_is_lost_when_no_restart_is_left():
    """Nobody ends it then, so that one that hangs says nothing any more."""

    async def script(actors, fleet, client):
        (answer,) = await _begun(client, _asked_for())
        fleet.report(fleet.all()[0], EngineFailure("hangs"))
        with pytest.raises(EngineFailure, match="hangs"):
            await answer
        _, late = await asyncio.wait([asyncio.ensure_future(client.abort())], timeout=5)
        return late

    assert _with_engines(script, fault=FaultConfig(engine_restarts=0)) == set()


def test_an_abort_that_overtakes_what_was_asked_is_made_again():
    async def script(actors, fleet, client):
        (answer,) = await _begun(client, _asked_for("a", 3))
        abort, calls = actors[0].abort.remote, []

        async def abort_what_is_there():
            calls.append("abort")
            if len(calls) > 1:
                await abort()

        actors[0].abort = SimpleNamespace(remote=abort_what_is_there)
        aborting = asyncio.ensure_future(client.abort())
        await asyncio.wait([answer], timeout=5)
        assert answer.done()
        await aborting
        return await answer

    assert _with_engines(script).status is Status.ABORTED
