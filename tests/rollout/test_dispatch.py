"""Which engine gets which request."""

import random
from dataclasses import replace

import pytest
from rollout_requests import make_requests

from rollout.dispatch import Dispatcher, RoutingCounts
from rollout.engine_loads import EngineLoads
from rollout.requests import GenerateRequest, SamplingParameters


def dispatcher_of(requests, **limits) -> Dispatcher:
    dispatcher = Dispatcher(**limits)
    for request in requests:
        dispatcher.add(request)
    return dispatcher


def test_requests_go_to_the_engine_with_the_fewest_tokens_in_flight():
    requests = [GenerateRequest(str(size), (1,) * size, SamplingParameters(1), 0) for size in (90, 10, 10, 10)]
    batches = dispatcher_of(requests, engines=2, requests_per_engine=8).assign()
    assert [one.request_id for one in batches[0]] == ["90"]
    assert len(batches[1]) == 3


def test_requests_beyond_the_room_wait_until_one_has_finished():
    requests = [GenerateRequest(str(index), (1,), SamplingParameters(1), 0) for index in range(3)]
    dispatcher = dispatcher_of(requests, engines=1, requests_per_engine=2)
    first = dispatcher.assign()[0]
    assert len(first) == 2
    assert dispatcher.assign() == {}
    dispatcher.finished(0, first[0])
    assert [one.request_id for one in dispatcher.assign()[0]] == ["2"]


@pytest.mark.parametrize("seed", range(4))
def test_the_least_loaded_engine_is_the_one_that_a_search_finds(seed):
    numbers = random.Random(seed)
    loads, flights, serving = EngineLoads(9, most_requests=3), [[] for _ in range(9)], set(range(9))
    for _ in range(2000):
        engine = numbers.randrange(9)
        choice = numbers.random()
        if choice < 0.5 and loads.has_room(engine):
            flights[engine].append(numbers.randrange(1, 5))
            loads.add(engine, flights[engine][-1])
        elif choice < 0.95 and flights[engine]:
            loads.remove(engine, flights[engine].pop())
        elif choice > 0.97:
            serving = set(numbers.sample(range(9), numbers.randint(1, 9)))
            loads.serve_by(serving)
        free = [one for one in sorted(serving) if len(flights[one]) < 3]
        assert loads.least() == min(free, key=lambda one: sum(flights[one]), default=None)
        assert loads.fair_tokens(7) == (sum(sum(flights[one]) for one in serving) + 7) / len(serving)
        assert loads.busy() == [one for one in range(9) if flights[one]]


def test_urgent_requests_go_before_all_that_wait():
    requests = [GenerateRequest(str(i), (1,), SamplingParameters(1), 0, urgent=i > 1) for i in range(4)]
    dispatcher = dispatcher_of(requests, engines=1, requests_per_engine=3)
    assert [one.request_id for one in dispatcher.assign()[0]] == ["2", "3", "0"]
    assert [one.request_id for one in dispatcher.take_waiting()] == ["1"]
    assert not dispatcher.has_waiting


def test_urgent_requests_wait_too_and_are_taken_first():
    dispatcher = dispatcher_of([GenerateRequest("0", (1,), SamplingParameters(1), 0)], engines=1, requests_per_engine=1)
    dispatcher.assign()
    dispatcher.add(GenerateRequest("1", (1,), SamplingParameters(1), 0, urgent=True))
    assert dispatcher.has_waiting
    dispatcher.add(GenerateRequest("2", (1,), SamplingParameters(1), 0))
    assert [one.request_id for one in dispatcher.take_waiting()] == ["1", "2"]


def test_what_a_lost_engine_owes_comes_first_again_and_goes_to_those_that_serve():
    requests = make_requests(6)
    dispatcher = Dispatcher(2, 3)
    for request in requests:
        dispatcher.add(request)
    batches = dispatcher.assign()
    later = replace(requests[0], request_id="later")
    dispatcher.add(later)
    dispatcher.put_back(0, batches[0])
    dispatcher.serve_by({1: "b"})
    assert dispatcher.assign() == {}
    for request in batches[1]:
        dispatcher.finished(1, request)
    assert dispatcher.assign() == {1: batches[0]}
    dispatcher.serve_by({0: "new", 1: "b"})
    assert dispatcher.assign() == {0: [later]}
    assert dispatcher.busy_engines() == [0, 1]


def turns(conversations: int, turn: int, first: int = 0) -> list[GenerateRequest]:
    """Request `turn` of each conversation, all of one size."""
    sampling = SamplingParameters(10)
    return [
        GenerateRequest(f"c{index}.{turn}", (1,) * 10, sampling, 0, conversation_id=f"c{index}")
        for index in range(first, first + conversations)
    ]


def group(name: str, samples: int) -> list[GenerateRequest]:
    sampling = SamplingParameters(10)
    return [GenerateRequest(f"{name}-{index}", (1,) * 10, sampling, 0, group_id=name) for index in range(samples)]


def engine_of(batches) -> dict[str, int]:
    return {one.conversation_id or one.group_id: engine for engine, batch in batches.items() for one in batch}


def finish(dispatcher: Dispatcher, batches) -> None:
    for engine, batch in batches.items():
        for request in batch:
            dispatcher.finished(engine, request)


def hand_out(dispatcher: Dispatcher, requests) -> dict[int, list[GenerateRequest]]:
    for request in requests:
        dispatcher.add(request)
    return dispatcher.assign()


def test_turns_of_a_conversation_stay_on_one_engine():
    dispatcher = Dispatcher(3, 100)
    first = hand_out(dispatcher, turns(30, 0))
    assert {len(batch) for batch in first.values()} == {10}
    finish(dispatcher, first)
    assert dispatcher.take_counts() == RoutingCounts(0, 0)
    for turn, order in ((1, 1), (2, -1)):  # whatever the order in which tools answer
        later = hand_out(dispatcher, turns(30, turn)[::order])
        assert engine_of(later) == engine_of(first)
        finish(dispatcher, later)
        assert dispatcher.take_counts() == RoutingCounts(30, 0)


def test_without_it_turns_go_where_the_load_is_least():
    dispatcher = Dispatcher(2, 100, follow_prefixes=False)
    first = hand_out(dispatcher, turns(3, 0))
    finish(dispatcher, first)
    later = hand_out(dispatcher, turns(3, 1)[1:])
    assert engine_of(later) != {name: engine for name, engine in engine_of(first).items() if name in engine_of(later)}


def test_a_conversation_leaves_an_engine_that_is_full_and_one_that_is_far_ahead_of_the_others():
    full = Dispatcher(2, 3)
    first = hand_out(full, turns(2, 0))
    busy = hand_out(full, turns(4, 0, first=2))  # both engines have three in flight
    full.finished(0, first[0][0])
    full.finished(1, first[1][0])
    more = hand_out(full, [replace(turns(1, 0)[0], conversation_id="", request_id="more")])  # engine 0 is full again
    assert list(more) == [0] and {engine: len(batch) for engine, batch in busy.items()} == {0: 2, 1: 2}
    assert engine_of(hand_out(full, turns(1, 1))) == {"c0": 1}
    assert full.take_counts() == RoutingCounts(1, 1)

    uneven = Dispatcher(2, 1000)
    finish(uneven, hand_out(uneven, turns(200, 0)))  # every other one has its home on engine 0
    stays = hand_out(uneven, turns(200, 1)[::2])
    assert len(stays[0]) == 1.5 * 50 + 4 and len(stays[1]) == 21


@pytest.mark.parametrize(("forgotten", "stay"), [(False, 100), (True, 79)])
def test_what_waits_counts_in_the_fair_share_until_it_is_taken(forgotten, stay):
    """Of 100 turns whose home is one of two engines, after the other one was lost with 41."""
    dispatcher = Dispatcher(2, 1000)
    finish(dispatcher, hand_out(dispatcher, turns(200, 0)))
    before = hand_out(dispatcher, turns(100, 1)[1::2])
    finish(dispatcher, {0: before[0]})
    dispatcher.put_back(1, before[1])
    if forgotten:
        assert len(dispatcher.take_waiting()) == 41
    batches = hand_out(dispatcher, turns(200, 1)[::2])
    assert sum(one.request_id in {f"c{index}.1" for index in range(0, 200, 2)} for one in batches[0]) == stay


def test_few_turns_do_not_leave_their_engine_for_an_idle_one():
    dispatcher = Dispatcher(2, 100)
    finish(dispatcher, hand_out(dispatcher, turns(8, 0)))
    assert set(engine_of(hand_out(dispatcher, turns(8, 1)[::2])).values()) == {0}


def test_conversations_of_a_lost_engine_go_on_elsewhere_and_stay_there():
    dispatcher = Dispatcher(2, 100)
    dispatcher.serve_by({0: "a", 1: "b"})
    first = hand_out(dispatcher, turns(4, 0))
    dispatcher.put_back(0, first[0])
    for request in first[1]:
        dispatcher.finished(1, request)
    dispatcher.serve_by({1: "b"})
    again = dispatcher.assign()
    assert set(engine_of(again)) == {"c0", "c2"} and set(again) == {1}
    finish(dispatcher, again)
    assert dispatcher.take_counts() == RoutingCounts(2, 2)
    dispatcher.serve_by({0: "another", 1: "b"})
    later = hand_out(dispatcher, turns(4, 1))
    assert set(engine_of(later).values()) == {1}
    assert dispatcher.take_counts() == RoutingCounts(4, 0)


def test_an_engine_that_took_the_place_of_another_is_no_ones_home():
    dispatcher = Dispatcher(2, 100)
    dispatcher.serve_by({0: "a", 1: "b"})
    first = hand_out(dispatcher, turns(2, 0))
    finish(dispatcher, first)
    dispatcher.serve_by({0: "another", 1: "b"})
    assert list(hand_out(dispatcher, group("load", 1))) == [0]
    assert engine_of(hand_out(dispatcher, turns(1, 1))) == {"c0": 1}
    assert dispatcher.take_counts() == RoutingCounts(1, 1)


@pytest.mark.parametrize(("groups", "engines"), [(16, 2), (8, 4), (3, 2), (1, 2), (5, 3)])
def test_samples_of_a_group_share_an_engine_as_far_as_the_load_stays_fair(groups, engines):
    samples = 8
    requests = [one for index in range(groups) for one in group(f"g{index}", samples)]
    batches = hand_out(Dispatcher(engines, 1000), requests)
    assert max(map(len, batches.values())) <= max(1.1 * groups * samples / engines, samples // engines + 1)
    places = {(one.group_id, engine) for engine, batch in batches.items() for one in batch}
    splits = len(places) - groups
    assert splits == 0 if groups % engines == 0 else splits < engines


def test_the_oldest_homes_are_forgotten(monkeypatch):
    monkeypatch.setattr("rollout.dispatch._REMEMBERED_HOMES", 3)
    dispatcher = Dispatcher(2, 100)
    finish(dispatcher, hand_out(dispatcher, turns(3, 0)))
    finish(dispatcher, hand_out(dispatcher, turns(1, 1)))
    finish(dispatcher, hand_out(dispatcher, turns(1, 0, first=3)))  # instead of the second, which answered longest ago
    assert dispatcher.take_counts().later_turns == 1
    for index, is_known in ((3, True), (0, True), (2, True), (1, False)):
        hand_out(dispatcher, turns(1, 2, first=index))
        assert dispatcher.take_counts().later_turns == is_known


def test_later_turns_follow_a_response_that_moved():
    dispatcher = Dispatcher(3, 8)
    (begun,) = turns(1, 0)
    assert hand_out(dispatcher, [begun]) == {0: [begun]}
    dispatcher.move(0, begun, target=2)
    assert dispatcher.assign() == {2: [begun]}
    dispatcher.finished(2, begun)
    assert engine_of(hand_out(dispatcher, turns(1, 1))) == {"c0": 2}


def test_where_a_response_was_to_move_is_forgotten_with_it():
    dispatcher = Dispatcher(2, 8, follow_prefixes=False)
    (begun,) = turns(1, 0)
    hand_out(dispatcher, [begun])
    dispatcher.move(0, begun, target=1)
    assert dispatcher.take_waiting() == [begun]
    assert hand_out(dispatcher, [begun]) == {0: [begun]}


def test_loads_that_change_often_take_no_more_room():
    loads = EngineLoads(4, most_requests=100)
    for _ in range(1000):
        loads.add(3, 1)
        loads.remove(3, 1)
    assert len(loads._heap) <= 8 * 4 + 64 and loads.least() == 0
