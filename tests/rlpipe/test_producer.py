"""Rollouts as the driver sees them, with engines and graders that answer in the process."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from rlpipe.config.load import validate
from rlpipe.data.stream import StreamState
from rlpipe.generation.group_source import Responded
from rlpipe.generation.producer import Rollouts
from rlpipe.monitoring.console import Console
from rlpipe.shared.errors import RolloutError
from rlpipe.shared.number_arrays import LossMask
from rlpipe.shared.sample import Prompt, Reward, Sample, Status, VersionSpan
from rlpipe.shared.turn import Turn

PROMPTS = [Prompt(f"p{number}", "", (number,), "label", "t") for number in range(5)]


class _Engines:
    """A pool and its client. Responses have two turns; every `failing`-th one fails."""

    def __init__(self, failing=0):
        self.failing = failing
        self.requests = []

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

    async def respond(self, request, partial):
        self.requests.append(request)
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
    def submit(self, sample_id, name, text, label, options, facts):
        future = Future()
        future.set_result(Reward(1.0, True, ""))
        return future


def _rollouts(engines, said=None, state=StreamState(), pending=(), **rollout):
    config = validate(
        {
            "run": {"name": "r", "iterations": 2},
            "model": {"path": "none"},
            "data": {"train": [{"name": "t", "path": "t.jsonl"}], "shuffle": False},
            "rollout": {"prompts_per_iteration": 2, "samples_per_prompt": 2, **rollout},
        },
        "test",
    )
    episodes = SimpleNamespace(
        open=lambda *_: None,
        make=engines.respond,
        take_notes=lambda: [],
        take_metrics=lambda: {},
        close=lambda: None,
    )
    inputs = SimpleNamespace(
        config=config,
        tokenizer=SimpleNamespace(decode=str),
        training=SimpleNamespace(prompts=PROMPTS),
        chooser=SimpleNamespace(choose=lambda prompt: SimpleNamespace(name="math", options={})),
        episodes=episodes,
        filters=(),
    )
    console = Console(2)
    console.say = (said if said is not None else []).append
    return Rollouts(engines, _Graders(), inputs, console, state, pending)


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
    assert [request.prompt.prompt_id for request in engines.requests[::2]] == ["p4", "p1"]
    assert [request.group_id for request in engines.requests[::2]] == ["00000004", "00000006"]
