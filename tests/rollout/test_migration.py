"""Responses that move from one engine to another while they are written."""

import asyncio
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from rollout_requests import generate, make_requests

from rlpipe.config.fault import FaultConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.estimate.engine_pools import LEAST_SHARED_TOKENS
from rlpipe.shared.errors import EngineFailure
from rlpipe.shared.sample import Status, VersionSpan
from rollout.client import EngineClient
from rollout.dispatch import Dispatcher, RoutingCounts
from rollout.fleet import EngineState, Fleet, RunningEngine
from rollout.migration import Move, Pace, Running, worthwhile_moves
from rollout.partial_response import PartialResponse
from rollout.requests import GenerateRequest, Generation, SamplingParameters

STEEP, FLAT = Pace(1.0, 1.0), Pace(1.0, 0.001)


def running(*rests: int, read_tokens: int = 10, stays: bool = False) -> list[Running]:
    return [Running(f"r{rest}", rest, read_tokens, stays) for rest in rests]


def test_the_engine_that_ends_last_hands_on_what_has_least_left():
    engines = {0: running(1000, 40, 30, 20), 1: running(60), 2: running(50, 51)}
    assert worthwhile_moves(engines, STEEP) == [Move("r20", 0, 1)]  # two more would not be fewer than the others have
    assert worthwhile_moves({0: running(1000, 40, 30, 20), 1: []}, STEEP) == [Move("r20", 0, 1), Move("r30", 0, 1)]


@pytest.mark.parametrize(
    ("engines", "pace"),
    [
        ({0: running(1000, 40, 30, 20), 1: []}, FLAT),  # a step takes as long with fewer
        ({0: running(1000, 40, 30, 20, read_tokens=10_000), 1: []}, STEEP),  # reading takes longer than it gains
        ({0: running(1000, 40, 30, 20, stays=True), 1: []}, STEEP),  # they moved before
        ({0: running(1000, 40), 1: running(5)}, STEEP),
        ({0: running(1000, 40, 30, 20)}, STEEP),
        ({0: [], 1: []}, STEEP),
    ],
)
def test_what_gains_nothing_stays(engines, pace):
    assert worthwhile_moves(engines, pace) == []


@pytest.mark.parametrize(("read_tokens", "moves"), [(160, 1), (161, 0)])
def test_a_token_that_is_read_again_costs_a_quarter_of_a_written_one(read_tokens, moves):
    """What has 20 tokens left gains two seconds with each."""
    engines = {0: running(1000, 40, 30, 20, read_tokens=read_tokens), 1: []}
    assert len(worthwhile_moves(engines, STEEP)[:1]) == moves


def test_what_is_gained_is_that_of_evening_out_in_the_end():
    assert worthwhile_moves({0: running(*range(100, 110)), 1: []}, Pace(30.0, 1.0))[0] == Move("r100", 0, 1)
    assert worthwhile_moves({0: running(100, 110, 120), 1: []}, Pace(27.0, 1.0)) == []  # of three one engine keeps two


def test_the_engine_that_ends_last_is_the_one_with_the_most_seconds_left():
    engines = {0: running(100, 90, 80, 70), 1: running(120), 2: []}
    assert worthwhile_moves(engines, STEEP)[0] == Move("r70", 0, 2)


@pytest.mark.parametrize("seed", range(20))
def test_moves_end_and_never_make_the_last_end_later(seed):
    drawn = random.Random(seed)
    engines = {
        index: [Running(f"{index}.{number}", math.ceil(drawn.lognormvariate(4, 1)), 1) for number in range(count)]
        for index, count in enumerate(drawn.choices(range(9), k=4))
    }

    def last_seconds(engines):
        return max(
            max((one.rest_tokens for one in own), default=0) * STEEP.seconds(len(own)) for own in engines.values()
        )

    moves = worthwhile_moves(engines, STEEP)
    assert len({move.name for move in moves}) == len(moves)
    after = {index: list(own) for index, own in engines.items()}
    for move in moves:
        (one,) = [one for one in after[move.source] if one.name == move.name]
        after[move.source].remove(one)
        after[move.target].append(one)
    assert last_seconds(after) <= last_seconds(engines)


def request(name: str, tokens: int = 100) -> GenerateRequest:
    return GenerateRequest(name, (1, 2), SamplingParameters(1000), 0, conversation_id=name, expected_tokens=tokens)


def test_a_request_goes_where_it_is_to_move_and_elsewhere_if_that_is_lost():
    dispatcher = Dispatcher(3, 8)
    for name in "abc":
        dispatcher.add(request(name))
    assert {engine: batch[0].request_id for engine, batch in dispatcher.assign().items()} == {0: "a", 1: "b", 2: "c"}
    written = PartialResponse((7,) * 3, (-1.0,) * 3, (VersionSpan(0, 3),))
    dispatcher.move(0, replace(request("a"), partial=written), target=2)  # engine 0 has less to do and its prefix
    assert [batch[0].partial for batch in dispatcher.assign().values()] == [written]
    assert dispatcher.busy_engines() == [1, 2]
    dispatcher.move(1, request("b"), target=2)
    dispatcher.serve_by({0: object(), 1: object()})
    assert list(dispatcher.assign()) == [0]
    assert dispatcher.take_counts() == RoutingCounts(moved_responses=2, read_tokens=5 + 2)


# Of each engine for each of its answers: seconds, retractions, prompt tokens, cached ones and kept drafts.
WORK = [(0.25, 1, 5, 4, (3, 1)), (0.5, 2, 30, 8, (1, 0, 7))]


class _Engine:
    """Writes the tokens of its requests, 0, 1, 2 and so on, one after a while and as many as the seed says, or until a
    request is released."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.released: set[str] = set()
        self.told: list[str] = []
        self.generate = SimpleNamespace(remote=self._answers)
        self.release = SimpleNamespace(remote=self._release)
        self.address = self.start = self.room_beside_bytes = SimpleNamespace(remote=lambda *given: None)

    async def _answers(self, batch):
        tasks = [asyncio.ensure_future(self._write(request)) for request in batch]
        for done in asyncio.as_completed(tasks):
            yield self._listed(done)

    async def _listed(self, done):
        return [await done]

    async def _write(self, request):
        tokens = list(request.partial.token_ids)
        while len(tokens) < request.seed and request.request_id not in self.released:
            await asyncio.sleep(0.005)
            tokens.append(len(tokens))
        self.released.discard(request.request_id)
        status = Status.COMPLETED if len(tokens) == request.seed else Status.ABORTED
        spans = (VersionSpan(1, len(tokens)),)
        logprobs, (seconds, retractions, *work) = (-1.0,) * len(tokens), WORK[self.index]
        return Generation(
            request.request_id, tuple(tokens), logprobs, status, spans, self.index, seconds, retractions, None, *work
        )

    async def _release(self, names):
        self.told += names
        self.released.update(names)


def two_engines() -> tuple[list[_Engine], Fleet, EngineClient]:
    actors = [_Engine(index) for index in range(2)]
    engines = [
        RunningEngine(SimpleNamespace(index=actor.index, log_path=""), actor, state=EngineState.SERVING)
        for actor in actors
    ]
    fleet = Fleet(engines, FaultConfig(), lambda _engine, failure, _why: failure)
    client = EngineClient(fleet, 8, keep_tokens=True, migrates=True)
    client.note_pace(STEEP)
    return actors, fleet, client


# What is expected, and written in truth. By the first engine 0 gets a, d and f, and engine 1 the others, which it ends
# at once.
LENGTHS = {"a": (1000, 300), "b": (900, 2), "c": (600, 2), "d": (590, 300), "e": (500, 2), "f": (490, 300)}
REQUESTS = [
    GenerateRequest(name, (1,), SamplingParameters(8000), tokens, expected_tokens=expected)
    for name, (expected, tokens) in LENGTHS.items()
]


async def _answers_to_all(client: EngineClient) -> list[Generation]:
    return await asyncio.wait_for(asyncio.gather(*map(client.generate, REQUESTS)), 60)


def test_what_one_engine_began_another_ends():
    actors, _, client = two_engines()
    answers = asyncio.run(_answers_to_all(client))
    client.close()
    assert [one.token_ids for one in answers] == [tuple(range(one.seed)) for one in REQUESTS]
    routing = client.take_routing()
    assert actors[0].told == ["f"] and routing.moved_responses == 1 and routing.read_tokens > 10
    assert {one.engine for one in answers if one.request_id in "bcef"} == {1}
    moved, here, there = (next(one for one in answers if one.request_id == name) for name in "fae")
    assert [_work(one) for one in (moved, here, there)] == [(0.75, 3, 35, 12, (4, 1, 7)), *WORK]
    assert client.busy_engines() == []


def _work(one: Generation) -> tuple:
    return one.seconds, one.retractions, one.prompt_tokens, one.cached_tokens, one.kept_drafts


@pytest.mark.parametrize("lost", [0, 1])
def test_an_engine_may_be_lost_while_a_response_moves(lost):
    """Either the one that is to hand it on, or the one that it goes to."""
    actors, fleet, client = two_engines()

    async def release(names):
        fleet.report(fleet.all()[lost], EngineFailure("gone"))
        actors[0].released.update(names)

    actors[0].release = SimpleNamespace(remote=release)
    answers = asyncio.run(_answers_to_all(client))
    client.close()
    assert [one.token_ids for one in answers] == [tuple(range(one.seed)) for one in REQUESTS]
    assert {one.engine for one in answers if one.request_id in "adf"} == {1 - lost}
    assert client.busy_engines() == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("written", [False, True])
def test_real_engines_hand_on_what_they_write(dense_pool, written):
    """Engine 0 is asked to end requests early that engine 1 goes on with: the tokens are those of one engine. Some are
    written by then; or engine 0 still waits for the prompt that they share, so that SGLang knows none of them."""
    requests = sharing_a_prompt(make_requests(8, new_tokens=400))
    whole = generate(dense_pool, requests)

    async def move_meanwhile():
        client = EngineClient(dense_pool._fleet, 16, keep_tokens=True, follow_prefixes=False, migrates=True)
        asked = [asyncio.ensure_future(client.generate(one)) for one in requests]
        while not (any(client.running_lengths()) if written else client.busy_engines()):
            await asyncio.sleep(0.02 if written else 0)
        (first, *_) = dense_pool.serving()
        names = [name for name, owner in client._owners.items() if owner is first]
        client._leaving.update(dict.fromkeys(names, 1))
        await client._release(first, names)
        answers = await asyncio.gather(*asked)
        routing = client.take_routing()
        client.close()
        return names, answers, routing

    names, answers, routing = asyncio.run(move_meanwhile())
    assert names and routing.moved_responses == len(names) and routing.read_tokens > 0
    assert [one.token_ids for one in answers] == [one.token_ids for one in whole]
    assert {one.engine for one in answers} == {1}
    assert all(one.status is Status.TRUNCATED and len(one.logprobs) == 400 for one in answers)


def sharing_a_prompt(requests: list[GenerateRequest]) -> list[GenerateRequest]:
    prompt = tuple(range(LEAST_SHARED_TOKENS))
    return [replace(one, prompt_ids=prompt, group_id="group") for one in requests]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "async", "engine": {"deterministic": False}}, "set migration to false or mode to 'sync'"),
        ({}, r"rollout\.engine\.deterministic is true: set one of them to false"),
    ],
)
def test_settings_that_contradict_it_are_refused(settings, words):
    with pytest.raises(ValidationError, match=words):
        RolloutConfig(migration=True, **settings)
    RolloutConfig(migration=True, engine={"deterministic": False})
