"""The client's own bookkeeping, with engines that are no processes: what waits goes out as answers come in."""

import asyncio
from types import SimpleNamespace

import pytest

from rlpipe.config.fault import FaultConfig
from rlpipe.config.root import Config
from rlpipe.shared.sample import Status, VersionSpan
from rollout.client import EngineClient
from rollout.fleet import EngineState, Fleet, RunningEngine
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
