"""What waiting for the last responses costs, what is expected of lengths, and what other settings would have saved."""

import json
import random
from dataclasses import asdict, replace

import pytest

from rlpipe.generation.length_history import LengthHistory
from rlpipe.monitoring.report.history import History, read_history
from rlpipe.monitoring.report.page import render
from rlpipe.monitoring.report.tail import tail_advice
from rlpipe.monitoring.report.tail_replay import Setting, replay
from rlpipe.monitoring.response_record import (
    GroupLengths,
    ResponseRecord,
    RolloutShape,
    measured_pace,
    read_record,
    tail_metrics,
)
from rlpipe.shared.sample import Prompt, VersionSpan
from rollout.dispatch import Dispatcher
from rollout.migration import Pace, expected_rest
from rollout.partial_response import PartialResponse
from rollout.requests import GenerateRequest, ResponseSpan, SamplingParameters

SHAPE = RolloutShape(
    engines=1, running=2, wanted=3, longest_first=False, oversampling=1.0, partial=False, max_staleness=1
)
ARRIVAL, LONGEST = Setting(longest_first=False), Setting()


def prompt(row: int, dataset: str = "a") -> Prompt:
    return Prompt(f"{dataset}/{row}", "text", (1,), "label", dataset)


def record(*groups: tuple[int, ...], shape: RolloutShape = SHAPE, pace: Pace = Pace(1.0, 0.0)) -> ResponseRecord:
    """Groups whose mean length was expected."""
    return ResponseRecord(shape, 1.0, pace, tuple(GroupLengths(one, sum(one) // len(one)) for one in groups))


def test_a_prompt_is_expected_to_be_answered_as_it_was_and_a_new_one_as_its_data_set():
    history = LengthHistory()
    assert history.expected(prompt(0)) is None
    history.note(prompt(0), (10, 30))
    history.note(prompt(1), (100, 100))
    assert [history.expected(prompt(row)) for row in (0, 1, 2)] == [20, 100, 60]
    assert history.expected(prompt(0, "b")) is None
    history.note(prompt(0), (40, 40))
    assert history.expected(prompt(0)) == 30  # as much of the newest as of all before
    again = LengthHistory(json.loads(json.dumps(history.state())))
    again.note(prompt(1), (3, 4, 4))
    history.note(prompt(1), (3, 4, 4))
    assert again.state() == history.state()


def test_what_has_outgrown_its_expectation_is_expected_to_double():
    assert [expected_rest(100, written) for written in (0, 40, 60, 500)] == [100, 60, 60, 500]
    assert expected_rest(None, 40) is None and expected_rest(0, 0) == 1


@pytest.mark.parametrize(("longest_first", "order"), [(True, "dbace"), (False, "abcde")])
def test_the_longest_go_first_and_unknown_ones_before_them(longest_first, order):
    dispatcher = Dispatcher(1, 8, longest_first=longest_first)
    expected = {"a": 7, "b": 9, "c": 7, "d": None, "e": 1}
    for name, tokens in expected.items():
        dispatcher.add(GenerateRequest(name, (1,), SamplingParameters(20), 0, expected_tokens=tokens))
    batch = dispatcher.assign()[0]
    assert "".join(one.request_id for one in batch) == order
    dispatcher.put_back(0, batch[3:])
    dispatcher.add(GenerateRequest("f", (1,), SamplingParameters(20), 0))
    assert "".join(one.request_id for one in dispatcher.assign()[0]) == order[3:] + "f"


def test_spare_requests_wait_for_all_others_however_long_they_are():
    dispatcher = Dispatcher(1, 8)
    for name, spare, tokens in [("a", True, 9), ("b", False, 1), ("c", True, None), ("d", False, 5)]:
        dispatcher.add(GenerateRequest(name, (1,), SamplingParameters(20), 0, spare=spare, expected_tokens=tokens))
    assert "".join(one.request_id for one in dispatcher.assign()[0]) == "dbca"


def test_oversampling_neither_waits_for_spare_prompts_nor_trains_the_longest_alone():
    """In one order with the others, the longest of all would be begun first, and the shortest be thrown away."""
    lengths = [record((4,), (1,), (2,), (9,), (8,), (7,), shape=SHAPE)] * 4
    plain, oversampled = replay(lengths, LONGEST), replay(lengths, Setting(oversampling=2.0))
    assert oversampled.trained_tokens <= plain.trained_tokens
    assert oversampled.seconds <= plain.seconds


def test_loads_count_what_is_expected():
    dispatcher = Dispatcher(2, 8)
    for name, tokens in (("a", 90), ("b", 30), ("c", 30), ("d", 30)):
        dispatcher.add(GenerateRequest(name, (1,), SamplingParameters(1000), 0, expected_tokens=tokens))
    assert [[one.request_id for one in batch] for batch in dispatcher.assign().values()] == [["a"], ["b", "c", "d"]]


def test_what_a_lost_engine_had_begun_leaves_no_load_behind():
    def request(name: str, expected: int) -> GenerateRequest:
        return GenerateRequest(name, (1,), SamplingParameters(1000), 0, expected_tokens=expected)

    dispatcher = Dispatcher(2, 8)
    dispatcher.add(request("a", 90))
    dispatcher.assign()
    further = replace(request("a", 90), partial=PartialResponse((7,) * 40, (-1.0,) * 40, (VersionSpan(0, 40),)))
    dispatcher.put_back(0, [further])
    assert dispatcher.assign() == {0: [further]}
    dispatcher.finished(0, further)
    for name in ("b", "c"):
        dispatcher.add(request(name, 30))
    assert {engine: len(batch) for engine, batch in dispatcher.assign().items()} == {0: 1, 1: 1}


def test_room_that_stands_empty_is_counted():
    """Two responses on each of two engines; one of them is written twice as long as the others."""
    shape = replace(SHAPE, engines=2)
    spans = [ResponseSpan(f"r{index}", engine, 5.0, 6.0, 10) for index, engine in enumerate((0, 0, 1))]
    turns = [ResponseSpan("r3", 1, 5.0, 5.5, 5), ResponseSpan("r3", 1, 5.5, 7.0, 15)]
    assert tail_metrics([*spans, *turns], shape) == {"rollout/tail_lost_share": 3 / 8, "rollout/tail_seconds": 1.0}
    assert tail_metrics([], shape) == {}


def test_the_pace_of_engines_is_read_off_their_responses():
    """Of four responses that begin together, the last one ends alone."""
    pace, lengths, time, written, spans = Pace(0.1, 0.05), [100, 200, 300, 400], 0.0, 0, []
    for running, length in zip((4, 3, 2, 1), lengths, strict=True):
        time += (length - written) * pace.seconds(running)
        written = length
        spans.append(ResponseSpan(f"r{length}", 0, 0.0, time, length))
    found = measured_pace(spans, running=4)
    assert [found.seconds(count) for count in (1, 4)] == pytest.approx([pace.seconds(count) for count in (1, 4)], 0.01)
    alike = [ResponseSpan("r", 0, 0.0, 1.0, 10)] * 3
    assert measured_pace(alike, running=4) == Pace(pytest.approx(0.1), 0.0)
    assert measured_pace([ResponseSpan("r", 0, 0.0, 1.0, 0)], running=4) == Pace(0.0, 0.0)


def test_what_an_engine_was_handed_and_does_not_run_yet_is_no_part_of_its_pace():
    """Two run at a time, two wait in the engine, as many seconds again as they run."""
    pace, spans, time = Pace(0.2, 0.1), [], 0.0
    for length in (40, 40, 40):
        taken, begin = length * pace.seconds(2), max(0.0, time - 40 * pace.seconds(2))
        time += taken
        spans += [ResponseSpan(f"{time} {one}", 0, begin, time, length) for one in range(2)]
    assert measured_pace(spans, running=2).seconds(2) == pytest.approx(pace.seconds(2))


def test_the_longest_response_is_not_begun_last():
    """By arrival one slot writes 1 + 6 tokens while the other waits."""
    lengths = record((1,), (1,), (6,))
    first, second = replay([lengths], ARRIVAL), replay([lengths], LONGEST)
    assert (first.seconds, second.seconds) == (7.0, 6.0)
    assert first.lost_share == pytest.approx(1 - 8 / 14)
    assert second.lost_share == pytest.approx(1 - 8 / 12)


def test_engines_slow_down_with_what_they_run():
    assert replay([record((4,), (4,), (4,), pace=Pace(1.0, 0.5))], ARRIVAL).seconds == 4 * 2.0 + 4 * 1.5


def test_what_has_least_left_moves_to_an_engine_that_is_done():
    """Engine 0 gets the first and third, of which engine 1 goes on with the shorter."""
    shape = replace(SHAPE, engines=2, running=4, wanted=4)
    lengths = [record((100,), (2,), (60,), (1,), shape=shape, pace=Pace(1.0, 1.0))]
    moving = replace(ARRIVAL, migration=True)
    # A step takes 3 s with two and 2 s with one.
    assert replay(lengths, ARRIVAL).seconds == 60 * 3 + 40 * 2
    assert replay(lengths, moving).seconds == pytest.approx(2 * 3 + 98 * 2, abs=2)
    alone = [replace(lengths[0], shape=replace(shape, engines=1))]
    assert replay(alone, moving) == replay(alone, ARRIVAL)


def test_what_is_aborted_is_thrown_away_or_goes_on():
    shape = replace(SHAPE, running=8, wanted=2)
    lengths = record((2,), (2,), (10,), (2,), (2,), (10,), shape=shape)
    assert replay([lengths], Setting(oversampling=1.0)).seconds == pytest.approx((2 + 10 + 10) / 3, rel=0.2)
    dropping = replay([lengths], Setting(oversampling=1.5))
    assert dropping.seconds == 2.0
    assert dropping.trained_tokens == 2.0  # the long ones are never trained
    assert dropping.dropped_share == pytest.approx(2 / 6)
    carrying = replay([lengths] * 8, Setting(oversampling=1.5, partial=True))
    assert carrying.trained_tokens > 2.0 and carrying.dropped_share < dropping.dropped_share


def _long_tailed(shape: RolloutShape, iterations: int = 4) -> list[ResponseRecord]:
    drawn = random.Random(0)
    groups = [
        tuple(max(1, int(drawn.lognormvariate(mean, 0.6))) for _ in range(4))
        for mean in (drawn.gauss(4.0, 0.8) for _ in range(iterations * shape.wanted))
    ]
    size = shape.wanted
    return [record(*groups[start : start + size], shape=shape) for start in range(0, len(groups), size)]


def test_the_report_advises_what_would_have_saved_most(tmp_path):
    records = _long_tailed(replace(SHAPE, engines=2, running=8, wanted=16))
    found = [read_record(json.loads(json.dumps({"iteration": 1, **asdict(one)}))) for one in records]
    assert found == records
    rows = tuple({"iteration": number, "time/step_seconds": 1.0} for number in (1, 2))
    history = History("run", rows, (), "", responses=tuple(records))
    (sentence,) = tail_advice(history)
    assert "of the engines' room empty" in sentence and "partial: true" in sentence
    page = render(history)
    assert "<h2>The tail</h2>" in page and "request_order: arrival (this run)" in page
    assert tail_advice(replace(history, responses=(record((5,), (5,), (5,), shape=replace(SHAPE, running=3)),))) == []


def test_damaged_records_are_left_out_of_the_report(tmp_path):
    whole = {"iteration": 1, **asdict(record((5,), (5,), (5,)))}
    wrong = [
        {**whole, "groups": []},
        {**whole, "seconds": "x"},
        {**whole, "shape": {**whole["shape"], "engines": 10**9}},
    ]
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n')
    (tmp_path / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (whole, *wrong)))
    history = read_history(tmp_path)
    assert len(history.responses) == 1
    assert history.notes == ("responses.jsonl: 3 damaged lines are left out.",)
    assert "The tail" in render(history)


def test_lengths_of_prompts_that_were_answered_lately_are_remembered(monkeypatch):
    monkeypatch.setattr("rlpipe.generation.length_history._REMEMBERED_PROMPTS", 2)
    history = LengthHistory()
    first, second, third = (Prompt(name, "", (1,), "", "data") for name in ("first", "second", "third"))
    for prompt, tokens in ((first, 10), (second, 20), (first, 10), (third, 30)):
        history.note(prompt, [tokens])
    assert list(history.state()["prompts"]) == ["first", "third"]
