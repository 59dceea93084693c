"""Rollouts as the driver sees them, with engines and graders that answer in the process."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from rlpipe.config.reward import RewardConfig
from rlpipe.data.stream import StreamState
from rlpipe.generation.group_source import Responded
from rlpipe.generation.producer import Rollouts
from rlpipe.generation.prompt_requests import requests_for_prompt
from rlpipe.monitoring.console import Console
from rlpipe.shared.errors import DeadlineError, RolloutError
from rlpipe.shared.number_arrays import LossMask
from rlpipe.shared.sample import Prompt, Reward, Sample, Status, VersionSpan
from rlpipe.shared.turn import Turn
from rollout.requests import SamplingParameters
from tests.small_config import small_config

PROMPTS = [Prompt(f"p{number}", "", (number,), "label", "t") for number in range(5)]


class _Engines:
    """A pool and its client. Responses have two turns; every `failing`-th one fails."""

    def __init__(self, failing=0, hangs=False):
        self.failing, self.hangs = failing, hangs
        self.requests, self.seeds = [], []

    def client(self):
        return self

    def running_lengths(self):
        return []

    def take_spans(self):
        return []

    def note_pace(self, pace):
        pass

    def close(self):
        pass

    def late(self, client, seconds):
        return DeadlineError(f"late after {seconds:g} seconds")

    async def respond(self, request, partial):
        self.requests.append(request)
        if self.hangs:
            await asyncio.sleep(5)
        if self.failing and len(self.requests) % self.failing == 0:
            raise ValueError("planted")
        turns = (Turn(0, 1), Turn(1, 2, number=1))
        sample = Sample(
            request.sample_id,
            request.group_id,
            request.prompt,
            (5, 6),
            "",
            (-1.0, -1.0),
            LossMask.filled(1, 2),
            (VersionSpan(0, 2),),
            Status.COMPLETED,
            0,
            turns=turns,
        )
        return Responded((sample,))


class _Graders:
    """Every `failing`-th response cannot be graded."""

    def __init__(self, failing=0):
        self.failing, self.asked = failing, 0

    def submit(self, sample_id, name, text, label, options, facts):
        self.asked += 1
        future = Future()
        failed = self.failing > 0 and self.asked % self.failing == 0
        future.set_result(Reward(0.0, None, "a hole", failed=True) if failed else Reward(1.0, True, ""))
        return future


def _rollouts(
    engines,
    said=None,
    state=StreamState(),
    pending=(),
    dataset=None,
    seconds=60.0,
    graders=None,
    failed_grades=0.5,
    others=(),
    prompts=PROMPTS,
    **rollout,
):
    config = small_config(
        run={"name": "r", "iterations": 2},
        seed=7,
        data={"train": [{"name": "t", "path": "t.jsonl", **(dataset or {})}, *others], "shuffle": False},
        deadlines={"rollout_seconds": seconds},
        reward={"max_failed_share": failed_grades},
        rollout={"prompts_per_iteration": 2, "samples_per_prompt": 2, **rollout},
        algorithm={"old_policy": "rollout"},
    )
    episodes = SimpleNamespace(
        open=lambda client, tokenizer, seed: engines.seeds.append(seed),
        make=engines.respond,
        take_notes=lambda: [],
        take_metrics=lambda: {},
        close=lambda: None,
    )
    inputs = SimpleNamespace(
        config=config,
        tokenizer=SimpleNamespace(decode=str),
        training=SimpleNamespace(prompts=prompts),
        chooser=SimpleNamespace(choose=lambda prompt: SimpleNamespace(name="math", options={})),
        episodes=episodes,
        filters=(),
    )
    console = Console(2)
    console.say = (said if said is not None else []).append
    return Rollouts(engines, graders or _Graders(), inputs, console, state, pending)


@pytest.mark.parametrize("share", [0.2, 0.3])
def test_a_run_goes_on_while_no_more_samples_fail_than_are_allowed(share):
    said = []
    with _rollouts(_Engines(failing=4), said, generate={"max_failed_share": share}) as rollouts:
        if share < 0.25:
            with pytest.raises(RolloutError, match=r"(?s)25% of the samples failed, .* = 20%; the last .*ValueError"):
                rollouts.take(1, 0)
            return
        batch = rollouts.take(1, 0)
    assert [sample.status for sample in batch.samples].count(Status.FAILED) == 1
    assert batch.metrics["rollout/failed_count"] == 1
    assert any("1 samples failed" in line and "planted" in line for line in said)


@pytest.mark.parametrize("share", [0.2, 0.3])
def test_a_run_goes_on_while_no_more_responses_stay_ungraded_than_are_allowed(share):
    """Of an iteration, and of what is asked for by itself; by default with half of them."""
    requests = requests_for_prompt("a", PROMPTS[0], 4, SamplingParameters(8))
    for take in (lambda rollouts: rollouts.take(1, 0).samples, lambda rollouts: rollouts.run(requests)):
        with _rollouts(_Engines(), graders=_Graders(failing=4), failed_grades=share) as rollouts:
            if share < 0.25:
                with pytest.raises(RolloutError, match="1 of 4 responses could not be graded, .* = 20%; the .* a hole"):
                    take(rollouts)
            else:
                assert [sample.reward.failed for sample in take(rollouts)].count(True) == 1


def test_a_run_whose_grader_fails_for_every_response_ends_by_default():
    share = RewardConfig().max_failed_share
    with (
        _rollouts(_Engines(), graders=_Graders(failing=1), failed_grades=share) as rollouts,
        pytest.raises(RolloutError, match="4 of 4 responses could not be graded"),
    ):
        rollouts.take(1, 0)


@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_so_many_transcripts_are_kept_as_are_wanted(count):
    with _rollouts(_Engines(), generate={"transcripts_per_iteration": count}) as rollouts:
        samples = rollouts.take(1, 0).samples
        assert len(rollouts.transcripts(samples)) == min(count, 4)


def test_prompts_that_were_taken_and_not_trained_come_first():
    engines = _Engines()
    with _rollouts(engines, state=StreamState(1, 1), pending=(4,)) as rollouts:
        rollouts.take(1, 0)
        assert rollouts.position() == (StreamState(1, 2), ())
    assert engines.seeds == [7]
    assert [request.prompt.prompt_id for request in engines.requests[::2]] == ["p4", "p1"]
    assert [request.group_id for request in engines.requests[::2]] == ["00000004", "00000006"]


def test_responses_of_a_data_set_are_sampled_as_it_says():
    engines = _Engines()
    with _rollouts(engines, dataset={"sampling": {"temperature": 0.5}}, sampling={"top_p": 0.9}) as rollouts:
        rollouts.take(1, 0)
    assert {(request.sampling.temperature, request.sampling.top_p) for request in engines.requests} == {(0.5, 0.9)}


def test_responses_that_do_not_come_end_the_run_at_its_deadline():
    with _rollouts(_Engines(hangs=True), seconds=0.5) as rollouts, pytest.raises(DeadlineError, match=r"0\.5 seconds"):
        rollouts.take(1, 0)


def test_what_is_asked_for_by_itself_comes_in_its_order_and_graded_unless_it_failed():
    requests = [requests_for_prompt(name, PROMPTS[0], 1, SamplingParameters(8))[0] for name in ("a", "b", "c")]
    with _rollouts(_Engines(failing=2), generate={"max_failed_share": 1.0}) as rollouts:
        samples = rollouts.run(requests)
    assert [sample.group_id for sample in samples] == ["a", "b", "c"]
    assert [sample.status is Status.FAILED for sample in samples] == [False, True, False]
    assert [sample.reward is not None for sample in samples] == [True, False, True]


@pytest.mark.parametrize(("mode", "kept"), [("sync", True), ("one_step_off", False)])
def test_what_a_replay_needs_is_kept_where_one_iteration_alone_is_written(mode, kept):
    with _rollouts(_Engines(), mode=mode) as rollouts:
        batch = rollouts.take(1, 0)
    assert (batch.record is not None) == kept
    if kept:
        assert [group.tokens for group in batch.record.groups] == [(2, 2), (2, 2)]
        assert batch.record.seconds == batch.seconds


def test_each_prompt_is_sampled_as_its_own_data_set_says():
    engines = _Engines()
    other = {"name": "u", "path": "u.jsonl", "sampling": {"temperature": 0.5}}
    prompts = [Prompt("p", "", (1,), "label", "t"), Prompt("q", "", (2,), "label", "u")]
    with _rollouts(engines, others=[other], prompts=prompts) as rollouts:
        rollouts.take(1, 0)
    asked = {(request.prompt.dataset, request.sampling.temperature) for request in engines.requests}
    assert asked == {("t", 1.0), ("u", 0.5)}


def test_prompts_that_still_wait_to_be_taken_again_are_kept_for_the_next_run():
    with _rollouts(_Engines(), state=StreamState(1, 1), pending=(1, 2, 3, 4)) as rollouts:
        rollouts.take(1, 0)
        assert rollouts.position() == (StreamState(1, 1), (3, 4))


def test_the_engines_are_told_their_pace_and_a_batch_has_what_makers_of_episodes_count():
    engines, told = _Engines(), []
    engines.note_pace = told.append
    with _rollouts(engines) as rollouts:
        rollouts._inputs.episodes.take_metrics = lambda: {"agent/requests_count": 3.0}
        batch = rollouts.take(1, 0)
    assert len(told) == 1
    assert batch.metrics.get("agent/requests_count") == 3


def test_what_is_graded_of_an_episode_is_what_was_written_last():
    engines, graders, graded = _Engines(), _Graders(), []
    respond, submit = engines.respond, graders.submit

    async def branched(request, partial):
        (sample,) = (await respond(request, partial)).episode
        return Responded(tuple(sample.changed(response_text=text) for text in ("first", "last")))

    engines.respond = branched
    graders.submit = lambda *given, facts: graded.append(given[2]) or submit(*given, facts)
    with _rollouts(engines, graders=graders) as rollouts:
        rollouts.run(requests_for_prompt("a", PROMPTS[0], 2, SamplingParameters(8)))
    assert graded == ["last"] * 2


def test_engines_that_do_not_end_what_they_generate_are_an_error_in_a_sentence(monkeypatch):
    """So that the end of a run that asks for it, to save first, is told and not this."""
    monkeypatch.setattr("rlpipe.generation.producer._ABORT_SECONDS", 0.05)
    engines = _Engines()
    engines.abort = lambda: asyncio.sleep(60)
    with _rollouts(engines) as rollouts, pytest.raises(DeadlineError, match=r"late after 0\.05 seconds"):
        rollouts.interrupt()
