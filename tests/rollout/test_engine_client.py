"""The client's own bookkeeping, with engines that are no processes: what waits goes out as answers come in."""

import asyncio
from types import SimpleNamespace

import pytest

from rlpipe.config.fault import FaultConfig
from rlpipe.shared.sample import Status, VersionSpan
from rollout.client import EngineClient
from rollout.fleet import EngineState, Fleet, RunningEngine
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
