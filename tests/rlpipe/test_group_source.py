"""Batches of groups: order, replacement, interruption, staleness. Responses come from functions with known timing."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlpipe.config.rollout import RolloutConfig
from rlpipe.generation import group_source, meter
from rlpipe.generation.filters import drop_reason, equal_rewards, truncated
from rlpipe.generation.group_source import GroupSource, Responded
from rlpipe.generation.prompt_requests import requests_for_prompt
from rlpipe.shared.errors import RolloutError
from rlpipe.shared.sample import Prompt, Reward, Sample, Status, VersionSpan
from rollout.partial_response import PartialResponse
from rollout.requests import SamplingParameters


class Policy:
    """Answers each request after a number of turns of the event loop; `abort` ends what is not answered yet."""

    def __init__(self, turns=lambda request: 1, score=lambda sample: float(sample.sample_id[-1]), failing=()) -> None:
        self.turns, self.score, self.failing = turns, score, failing
        self.version = 0
        self.number = 0
        self.branches = 1
        self.asked: list[str] = []
        self.graded: list[str] = []
        self.began_with: dict[str, PartialResponse] = {}
        self.aborted = False
        self.running = 0
        self.spare: set[str] = set()

    def source(self, **settings) -> GroupSource:
        config = RolloutConfig(**{"prompts_per_iteration": 2, "samples_per_prompt": 2} | settings)
        filters = (equal_rewards,) if config.filters else ()
        return GroupSource(config, self.take_group, self.respond, self.grade, filters, self.abort, 9)

    def take_group(self):
        prompt = Prompt(f"p{self.number}", "text", (1,), "label", "data")
        requests = requests_for_prompt(f"{self.number}", prompt, 2, SamplingParameters(8))
        self.number += 1
        return self.number - 1, requests

    async def respond(self, request, partial):
        self.asked.append(request.sample_id)
        self.spare |= {request.group_id} if request.spare else set()
        self.began_with[request.sample_id] = partial
        self.running += 1
        try:
            for _ in range(self.turns(request)):
                await asyncio.sleep(0)
                if self.aborted:
                    return Responded(None, partial.extended((7,), (-1.0,), self.version))
        finally:
            self.running -= 1
        status = Status.FAILED if request.sample_id in self.failing else Status.COMPLETED
        spans = (*partial.versions, VersionSpan(self.version, 3))
        tokens = len(partial.token_ids) + 3
        return Responded(
            self.branched(
                Sample(
                    request.sample_id,
                    request.group_id,
                    request.prompt,
                    (5,) * tokens,
                    "",
                    (-1.0,) * tokens,
                    (1,) * tokens,
                    spans,
                    status,
                    0,
                )
            )
        )

    def branched(self, sample):
        """`branches` samples, of which the last alone trains the first token."""
        if self.branches == 1:
            return (sample,)
        return tuple(
            replace(
                sample,
                sample_id=f"{sample.sample_id}.{index}",
                episode_id=sample.sample_id,
                loss_mask=(0,) * (index < self.branches - 1) + sample.loss_mask[(index < self.branches - 1) :],
            )
            for index in range(self.branches)
        )

    async def grade(self, episode):
        self.graded.append(episode[-1].sample_id)
        return tuple(replace(sample, reward=Reward(self.score(sample), None, "")) for sample in episode)

    async def abort(self):
        self.aborted = True
        while self.running:
            await asyncio.sleep(0)
        self.aborted = False


def groups_of(batch) -> list[str]:
    return list(dict.fromkeys(sample.group_id for sample in batch.samples))


def test_sync_batches_follow_the_prompts_and_nothing_runs_in_between():
    policy = Policy(turns=lambda request: 9 - int(request.group_id))

    async def run():
        source = policy.source()
        first = await source.take(1, 0)
        asked = len(policy.asked)
        await asyncio.sleep(0.01)
        assert len(policy.asked) == asked
        return first, await source.take(2, 1), await source.unfinished()

    first, second, unfinished = asyncio.run(run())
    assert (groups_of(first), groups_of(second), unfinished) == (["0", "1"], ["2", "3"], [])
    assert first.metrics == {"rollout/groups_started_count": 2.0}
    assert first.tokens == 12


@pytest.mark.parametrize("order", ["slow first", "slow last"])
def test_dropped_groups_are_replaced_by_the_next_prompts_whatever_the_timing(order):
    turns = (
        (lambda request: 30 - int(request.group_id))
        if order == "slow first"
        else (lambda request: 1 + int(request.group_id))
    )
    teaches = {"1", "4", "5"}
    policy = Policy(turns, score=lambda s: float(s.group_id in teaches and s.sample_id.endswith("0")))
    batch = asyncio.run(policy.source(filters=["equal_rewards"]).take(1, 0))
    assert groups_of(batch) == ["1", "4"]
    assert batch.metrics == {"rollout/groups_started_count": 5.0, "rollout/groups_dropped_equal_rewards_count": 3.0}


def test_replacement_ends_at_the_factor_and_the_missing_groups_are_counted():
    policy = Policy(score=lambda s: float(s.group_id == "0" and s.sample_id.endswith("0")))
    batch = asyncio.run(policy.source(filters=["equal_rewards"], max_groups_factor=2.0).take(1, 0))
    assert groups_of(batch) == ["0"]
    assert batch.metrics["rollout/missing_groups_count"] == 1
    assert batch.metrics["rollout/groups_started_count"] == 4


def test_an_iteration_without_any_group_is_an_error_with_the_reasons():
    policy = Policy(score=lambda sample: 1.0)
    with pytest.raises(RolloutError, match=r"iteration 1: all 8 groups were dropped .*equal_rewards"):
        asyncio.run(policy.source(filters=["equal_rewards"]).take(1, 0))


def test_failed_samples_are_counted_and_groups_without_any_other_are_replaced():
    policy = Policy(failing={"0-000", "0-001", "1-000"})
    batch = asyncio.run(policy.source().take(1, 0))
    assert groups_of(batch) == ["1", "2"]
    assert batch.metrics["rollout/failed_count"] == 3
    assert batch.metrics["rollout/groups_dropped_failed_count"] == 1


def test_oversampled_groups_are_aborted_and_counted():
    policy = Policy(turns=lambda request: 1000 if request.group_id == "0" else 1)
    source = policy.source(oversampling=1.5)
    batch = asyncio.run(source.take(1, 0))
    assert groups_of(batch) == ["1", "2"]
    assert batch.metrics["rollout/groups_dropped_aborted_count"] == 1
    assert policy.spare == {"2"}


def test_partial_responses_go_on_in_the_next_iteration_with_the_versions_of_their_tokens():
    policy = Policy(turns=lambda request: 1000 if request.sample_id == "0-001" and policy.version == 0 else 1)

    async def run():
        source = policy.source(oversampling=1.5, partial=True)
        first = await source.take(1, 0)
        unfinished = await source.unfinished()
        policy.version = 1
        return first, unfinished, await source.take(2, 1)

    first, unfinished, second = asyncio.run(run())
    assert (groups_of(first), unfinished) == (["1", "2"], [0])
    assert policy.spare == {"2", "4"}  # the unfinished one is needed now
    assert "0" in groups_of(second)
    continued = next(sample for sample in second.samples if sample.sample_id == "0-001")
    assert continued.versions == (VersionSpan(0, 1), VersionSpan(1, 3))
    assert policy.asked.count("0-000") == 1
    assert second.metrics["rollout/samples_continued_count"] == 1
    # Three tokens each of 0-000 and two groups, and the one with which 0-001 was interrupted; then the rest of it.
    assert (first.tokens, second.tokens) == (16, 3 + 6 + 6)


def test_groups_that_go_on_count_as_begun_for_their_iteration():
    policy = Policy(
        turns=lambda request: 1000 if request.group_id in "01" and policy.version == 0 else 1,
        score=lambda sample: float(policy.version == 0 and sample.sample_id.endswith("0")),
    )

    async def run():
        source = policy.source(oversampling=2.0, partial=True, filters=["equal_rewards"], max_groups_factor=2.0)
        first = await source.take(1, 0)
        policy.version = 1
        with pytest.raises(RolloutError, match="all 2 groups were dropped .*'samples_continued': 4"):
            await source.take(2, 1)
        return first

    first = asyncio.run(run())
    assert [group.number for group in first.lengths] == [2, 3]
    assert first.metrics["rollout/groups_carried_count"] == 2
    assert policy.number == 4 + 2


def test_what_an_iteration_leaves_is_counted_by_the_group_and_hinders_no_later_one():
    async def run(partial):
        policy = Policy(
            turns=lambda request: 1000 if request.group_id in "01" and policy.version == 0 else 1,
            score=lambda sample: float(sample.group_id not in "567" and sample.sample_id.endswith("0")),
        )
        source = policy.source(oversampling=2.0, filters=["equal_rewards"], partial=partial)
        first = await source.take(1, 0)
        policy.version = 2
        return first, await source.take(2, 2)

    first, second = asyncio.run(run(partial=False))
    assert first.metrics["rollout/groups_dropped_aborted_count"] == 2
    assert groups_of(second) == ["4", "8"]  # in the place of those that a filter dropped
    _, second = asyncio.run(run(partial=True))
    assert second.metrics["rollout/samples_restarted_count"] == 4


def test_graders_are_waited_for_only_while_no_response_is_written(monkeypatch):
    now = 0.0
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: now))
    waiting = meter.GradingMeter()
    with waiting.generating():
        now += 10
        with waiting.generating():
            now += 5
        now += 3
        assert waiting.take() == 0
    now += 2
    assert waiting.take() == 2
    with waiting.generating():
        now += 1
    assert waiting.take() == 2


@pytest.mark.parametrize(("mode", "seconds"), [("sync", 4), ("one_step_off", 104)])
def test_a_batch_has_the_seconds_that_were_given_to_it(monkeypatch, mode, seconds):
    """Where the next one is written while the actor trains, its time began when the last one ended."""
    batches = two_batches(monkeypatch, group_source, grading_seconds=0.5, mode=mode)
    assert sum(batch.seconds for batch in batches) == seconds


def test_filters_look_at_what_was_generated_alone():
    written = [sample_of(f"0-{index}", Status.TRUNCATED) for index in range(2)]
    failed = sample_of("0-2", Status.FAILED)
    assert drop_reason([*written, failed], (truncated,)) == drop_reason(written, (truncated,)) == "truncated"
    assert drop_reason([failed, failed], (truncated,)) == "failed"


def sample_of(sample_id: str, status: Status) -> Sample:
    prompt = Prompt("p", "text", (1,), "label", "data")
    return Sample(sample_id, "0", prompt, (5,), "", (-1.0,), (1,), (VersionSpan(0, 1),), status, 0)


def test_graders_are_waited_for_within_an_iteration_alone(monkeypatch):
    batches = two_batches(monkeypatch, meter, grading_seconds=0.25)
    assert [batch.grading_seconds for batch in batches] == [0.25, 0.25]


def two_batches(monkeypatch, clocked_module, grading_seconds, **settings):
    """Of a source whose graders take that long by the clock of `clocked_module`, and after the first of which the actor
    trains for 100 seconds."""
    now = 1000.0
    monkeypatch.setattr(clocked_module, "time", SimpleNamespace(perf_counter=lambda: now))
    policy = Policy()

    async def grade(episode):
        nonlocal now
        now += grading_seconds
        return tuple(replace(sample, reward=Reward(1.0, None, "")) for sample in episode)

    policy.grade = grade

    async def run():
        nonlocal now
        source = policy.source(**settings)
        first = await source.take(1, 0)
        now += 100
        return first, await source.take(2, 1)

    return asyncio.run(run())


def test_a_response_that_is_interrupted_again_counts_its_new_tokens_alone():
    policy = Policy(turns=lambda request: 1000 if request.sample_id == "0-001" and policy.version < 2 else 1)

    async def run():
        source = policy.source(oversampling=1.5, partial=True, max_staleness=2)
        batches = []
        for version in range(3):
            policy.version = version
            batches.append(await source.take(version + 1, version))
        return batches

    batches = asyncio.run(run())
    written = next(sample for sample in batches[-1].samples if sample.sample_id == "0-001")
    assert written.versions == (VersionSpan(0, 1), VersionSpan(1, 1), VersionSpan(2, 3))
    of_the_others = 3 * len({*policy.asked} - {"0-001"})
    assert sum(batch.tokens for batch in batches) == of_the_others + 1 + 1 + 3


def test_partial_responses_that_grew_too_old_begin_again():
    policy = Policy(turns=lambda request: 1000 if request.sample_id == "0-001" and policy.version == 0 else 1)

    async def run():
        source = policy.source(oversampling=1.5, partial=True)
        await source.take(1, 0)
        policy.version = 2
        return await source.take(2, 2)

    batch = asyncio.run(run())
    assert policy.began_with["0-001"] == PartialResponse()
    assert batch.metrics["rollout/samples_restarted_count"] == 2


def test_one_step_off_generates_the_next_iteration_during_training_and_settles_before_the_weights_change():
    policy = Policy(turns=lambda request: 3)

    async def run():
        source = policy.source(mode="one_step_off")
        first = await source.take(1, 0)
        assert len(policy.asked) == 8
        await source.wait_for_running()
        assert policy.running == 0
        policy.version = 1
        return first, await source.take(2, 1)

    first, second = asyncio.run(run())
    assert (groups_of(first), groups_of(second)) == (["0", "1"], ["2", "3"])
    assert {span.version for sample in second.samples for span in sample.versions} == {0}


def test_settling_waits_for_the_replacements_of_dropped_groups_too():
    policy = Policy(
        turns=lambda request: 3, score=lambda s: float(s.group_id not in "23" and s.sample_id.endswith("0"))
    )

    async def run():
        source = policy.source(mode="one_step_off", filters=["equal_rewards"])
        await source.take(1, 0)
        await source.wait_for_running()
        return policy.running

    assert asyncio.run(run()) == 0
    assert {name.split("-")[0] for name in policy.asked} == set("012345")


def test_async_hands_out_groups_as_they_finish_within_the_staleness():
    policy = Policy(turns=lambda request: 500 if request.group_id == "0" else 1)

    async def run():
        source = policy.source(mode="async", max_staleness=2)
        first = await source.take(1, 0)
        assert len({name.split("-")[0] for name in policy.asked}) == 6
        return first, await source.take(2, 1), await source.unfinished()

    first, second, unfinished = asyncio.run(run())
    assert groups_of(first) == ["1", "2"]
    assert groups_of(second) == ["3", "4"]
    assert unfinished[0] == 0


def test_async_drops_and_replaces_groups_that_are_too_old():
    policy = Policy()

    async def run():
        source = policy.source(mode="async", max_staleness=1)
        await source.take(1, 0)
        await asyncio.sleep(0.01)
        policy.version = 2
        return await source.take(2, 2)

    batch = asyncio.run(run())
    assert batch.metrics.get("rollout/groups_dropped_stale_count") == 2
    assert {span.version for sample in batch.samples for span in sample.versions} == {2}
    assert policy.number == 3 * 2 + 2  # of three iterations, and in the places of the two


def test_async_replaces_dropped_groups_of_all_iterations_that_are_ahead():
    policy = Policy(score=lambda sample: float(sample.group_id not in "0123" and sample.sample_id.endswith("0")))

    async def run():
        source = policy.source(mode="async", max_staleness=2, filters=["equal_rewards"])
        await source.take(1, 0)
        for _ in range(200):
            await asyncio.sleep(0)
        return policy.number, await source.unfinished()

    assert asyncio.run(run()) == (3 * 2 + 4, [6, 7, 8, 9])


def test_a_group_is_complete_with_its_episodes_whatever_the_number_of_their_branches():
    policy = Policy(turns=lambda request: 1000 if request.sample_id == "0-001" and policy.version == 0 else 1)
    policy.branches = 3

    async def run():
        source = policy.source(oversampling=1.5, partial=True)
        first = await source.take(1, 0)
        progress = source.progress(1)
        policy.version = 1
        return first, progress, await source.take(2, 1)

    first, progress, second = asyncio.run(run())
    assert groups_of(first) == ["1", "2"]
    assert [sample.sample_id for sample in first.samples[:4]] == ["1-000.0", "1-000.1", "1-000.2", "1-001.0"]
    assert (len(first.samples), len(policy.asked), progress.wanted) == (12, 6 + 1 + 2 * 2, 4)
    assert first.tokens == 5 * (2 + 2 + 3) + 1  # of four episodes, of the one that waits for its group, and aborted
    assert len(policy.graded) == len(set(policy.graded))
    assert policy.asked.count("0-000") == 1 and second.metrics["rollout/samples_continued_count"] == 1


def test_an_engines_error_ends_the_batch():
    policy = Policy()

    async def broken(request, partial):
        raise RolloutError("engine 0 died")

    policy.respond = broken
    with pytest.raises(RolloutError, match="engine 0 died"):
        asyncio.run(policy.source().take(1, 0))


def test_nothing_is_generated_beyond_the_last_iteration():
    policy = Policy()

    async def run():
        source = policy.source(mode="async", max_staleness=4)
        for iteration in range(1, 10):
            policy.version = iteration - 1
            await source.take(iteration, iteration - 1)
        return await source.unfinished()

    assert asyncio.run(run()) == []
    assert len(policy.asked) == 9 * 4


def test_a_group_whose_engine_failed_is_not_forgotten():
    policy = Policy()
    respond = policy.respond

    async def broken(request, partial):
        if request.group_id == "0":
            raise RolloutError("engine 0 died")
        return await respond(request, partial)

    policy.respond = broken

    async def run():
        source = policy.source()
        with pytest.raises(RolloutError, match="engine 0 died"):
            await source.take(1, 0)
        return await source.unfinished()

    assert asyncio.run(run()) == [0, 1]


def test_a_prompt_is_unfinished_once_at_every_moment():
    async def run():
        source = Policy(turns=lambda request: 2 + int(request.group_id)).source(mode="async", max_staleness=2)
        await source.take(1, 0)
        for _ in range(20):
            await asyncio.sleep(0)
            numbers = await source.unfinished()
            assert len(numbers) == len(set(numbers)), numbers

    asyncio.run(run())


@pytest.mark.parametrize(("partial", "name", "kept"), [(True, "carried", [2, 3]), (False, "dropped_aborted", [])])
def test_whole_groups_beyond_those_that_an_iteration_needs_are_kept_or_counted(partial, name, kept):
    async def run():
        source = Policy().source(oversampling=2.0, partial=partial)
        return await source.take(1, 0), await source.unfinished()

    batch, unfinished = asyncio.run(run())
    assert batch.metrics.get(f"rollout/groups_{name}_count") == 2
    assert unfinished == kept
