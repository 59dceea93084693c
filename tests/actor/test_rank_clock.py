"""Seconds of each part of a rank's work: exclusive, complete, and able to name the slow rank."""

import time

import numpy as np
import pytest
from train_support import in_module_worker, run_processes, write_policy

from actor.rank_clock import RankClock
from actor.train_report import RankUsage
from rlpipe.jit_monitor import JitReport
from rlpipe.training.measurement import rank_metrics, training_parts

SLEEP_SECONDS = 0.8
PARTS = ("forward", "backward", "optimizer", "train", "train_exchange")


def test_parts_have_their_own_seconds_only_and_exchanges_belong_to_the_outermost_part():
    heard: list[str] = []
    clock = RankClock(on_part=heard.append)
    with clock.exchange:
        pass
    with clock.part("train"):
        time.sleep(0.02)
        with clock.part("forward"):
            time.sleep(0.03)
            with clock.exchange:
                time.sleep(0.04)
    with clock.part("ref_logprob"), clock.exchange:
        time.sleep(0.01)
    seconds, spans = clock.take()
    assert set(seconds) == {"train", "forward", "train_exchange", "ref_logprob", "ref_logprob_exchange"}
    assert seconds["train_exchange"] >= 0.04 > seconds["forward"] - 0.01
    assert seconds["forward"] >= 0.03
    assert seconds["train"] >= 0.02
    assert heard == ["train", "forward", "train", "", "ref_logprob", ""]
    assert spans == ()
    assert clock.take() == ({}, ())


def test_an_error_inside_a_part_leaves_no_part_open():
    clock = RankClock()
    with pytest.raises(ValueError), clock.part("train"):
        clock.begin("forward")
        raise ValueError
    assert clock.current == ""


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """What `timing_workers.everything` found, by rank."""
    folder = tmp_path_factory.mktemp("policy")
    policies = {architecture: write_policy(folder, architecture) for architecture in ("dense", "moe")}
    return run_processes(2, in_module_worker, "timing_workers", "everything", policies, SLEEP_SECONDS)


@pytest.fixture
def planted(everything):
    """By rank: (whole call, seconds of each part) for each planted sleep."""
    return [rank["planted"] for rank in everything]


def test_parts_add_up_to_the_training_call(planted):
    for rank in planted:
        for where in ("nothing", "forward", "backward", "optimizer"):
            whole, seconds = rank[where]
            assert set(seconds) <= set(PARTS)
            assert sum(seconds.values()) == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize("part", ["forward", "backward", "optimizer"])
def test_a_planted_sleep_shows_in_its_part_and_names_the_slow_rank(planted, part):
    usages = [
        RankUsage(rank, f"node-{rank}", "", "", found[part][1], (), JitReport(1, rank, ()))
        for rank, found in enumerate(planted)
    ]
    slow, fast = usages[1].part_seconds, usages[0].part_seconds
    assert slow[part] >= SLEEP_SECONDS
    assert slow[part] - fast[part] >= 0.7 * SLEEP_SECONDS
    assert all(slow[other] < SLEEP_SECONDS for other in PARTS if other in slow and other != part)
    metrics = rank_metrics(usages)
    assert metrics["ranks/slowest"] == 1
    assert usages[int(metrics["ranks/slowest"])].name == "actor-1"
    assert metrics[f"ranks/{part}_max_seconds"] == slow[part]
    assert metrics[f"ranks/{part}_min_seconds"] == fast[part]
    assert training_parts(usages)[part] == pytest.approx((slow[part] + fast[part]) / 2)


def test_the_others_wait_for_the_slow_rank_in_an_exchange(planted):
    for part in ("forward", "backward"):
        assert planted[0][part][1]["train_exchange"] >= 0.7 * SLEEP_SECONDS
        assert planted[1][part][1]["train_exchange"] < 0.7 * SLEEP_SECONDS


def test_spans_lie_within_the_call_in_wall_clock_time(planted):
    begin, end, spans = planted[0]["spans"]
    assert {"train", "forward", "backward", "optimizer", "exchange"} == {span.name for span in spans}
    for span in spans:
        assert begin - 0.01 <= span.start_seconds <= span.start_seconds + span.seconds <= end + 0.01


@pytest.mark.parametrize("architecture", ["dense", "moe"])
def test_a_warm_up_changes_no_weight_no_moment_and_no_random_number(everything, architecture):
    for rank in everything:
        cold, warm = rank["warm_up"][architecture]["cold"], rank["warm_up"][architecture]["warm"]
        assert cold[0] == warm[0]
        assert cold[1] == warm[1]
        assert cold[4] == warm[4]
        assert all(np.array_equal(cold[2][name], warm[2][name]) for name in cold[2])
        assert len(cold[3]) == len(warm[3]) > 0
        assert all(np.array_equal(one, other) for one, other in zip(cold[3], warm[3], strict=True))


@pytest.mark.parametrize(("threads", "used"), [(1, 1), (2, 2), (4096, 3)])
def test_a_process_computes_with_as_many_threads_as_are_said_and_there_are_cores_for(threads, used):
    assert run_processes(1, in_module_worker, "timing_workers", "threads_of_a_process", threads, 3) == [used]


@pytest.mark.parametrize("architecture", ["dense", "moe"])
def test_a_warm_up_begins_every_exchange_of_a_step_but_those_of_new_weights(everything, architecture):
    for rank in everything:
        cold, warm = (rank["warm_up"][architecture][f"{name} begins"] for name in ("cold", "warm"))
        assert {operation for _, operation in cold} > {operation for _, operation in warm}
        assert {operation for _, operation in warm} == {"all_gather_into_tensor_coalesced"}, warm
