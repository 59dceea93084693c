"""Agents run as functions, threads and programs: their episodes, rewards, failures, time limits and interruptions."""

import asyncio
import copy
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from random_policy_engine import RandomPolicy, Written, assert_trained_once_as_sampled

from rlpipe.agents.agent_maker import AgentMaker
from rlpipe.agents.agent_task import report_of
from rlpipe.config.root import Config
from rlpipe.generation.episode_makers import episode_maker
from rlpipe.generation.event_loop import BackgroundLoop
from rlpipe.generation.prompt_requests import PromptRequest
from rlpipe.monitoring.metric_dictionary import check_names
from rlpipe.shared.errors import ConfigError, RolloutError
from rlpipe.shared.sample import Prompt, Status, VersionSpan
from rollout.partial_response import PartialResponse
from rollout.requests import Generation, SamplingParameters

PROGRAM = [sys.executable, str(Path(__file__).with_name("sample_agents.py"))]
WAIT_SECONDS = 120
DATA = {"name": "data", "path": "unused", "prompt_column": "question"}


def config_of(partial: bool = False, **agent) -> Config:
    ahead = {"partial": True, "oversampling": 2.0} if partial else {}
    return Config.model_validate(
        {
            "run": {"name": "agents", "iterations": 1},
            "model": {"path": "policy"},
            "data": {"train": [DATA], "max_prompt_tokens": 512},
            "rollout": {"max_response_tokens": 512, "generate": {"function": "agent", "agent": agent}, **ahead},
            "algorithm": {"old_policy": "rollout"},
        }
    )


def request_of(name: str = "g-000") -> PromptRequest:
    prompt = Prompt("data/0", "rendered", (1,), "42", "data", {"question": "What?", "level": 3})
    return PromptRequest(name, "g", prompt, SamplingParameters(512))


class Maker:
    """An open AgentMaker in front of a policy, with the loop that a run gives it."""

    def __init__(self, tokenizer, policy, config: Config) -> None:
        self.maker = episode_maker(config)
        assert isinstance(self.maker, AgentMaker)
        self.loop = BackgroundLoop("test")
        self.maker.open(policy, tokenizer, 0)

    def start(self, request=None, partial=PartialResponse()):
        return self.loop.submit(self.maker.make(request or request_of(), partial))

    def make(self, *arguments):
        return self.start(*arguments).result(WAIT_SECONDS)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.maker.close()
        self.loop.close()


@pytest.mark.parametrize(
    ("agent", "score", "answer", "turns"),
    [
        ({"run": "sample_agents:two_turns"}, 0.5, None, 2),
        ({"run": "sample_agents:two_turns", "options": {"reward": 2}}, 2.0, None, 2),
        ({"run": "sample_agents:two_turns", "options": {"reward": None}}, None, None, 2),
        ({"run": "sample_agents:plain_function"}, 1.0, None, 1),
        ({"command": PROGRAM}, 0.25, "label 42", 1),
    ],
)
def test_an_agent_makes_an_episode_however_it_is_run(tokenizer, agent, score, answer, turns):
    policy = RandomPolicy(tokenizer)
    with Maker(tokenizer, policy, config_of(**agent)) as maker:
        episode = maker.make().episode
        metrics = maker.maker.take_metrics()
        assert maker.maker.take_metrics()["agent/requests_count"] == 0
    (sample,) = episode
    assert len(sample.turns) == turns and sample.group_id == "g" and sample.sample_id == sample.episode == "g-000"
    assert (sample.reward.score if sample.reward else None) == score
    assert answer is None or sample.response_text == answer
    assert "What?" in tokenizer.decode(sample.prompt.token_ids)
    assert_trained_once_as_sampled(episode, policy.written)
    check_names(metrics)
    assert metrics["agent/requests_count"] == turns and metrics["agent/continued_requests_count"] == turns - 1
    assert 0 < metrics["agent/driver_mean_seconds"] < 10


def test_the_chat_template_is_told_what_the_data_section_says(tokenizer):
    quiet = copy.deepcopy(tokenizer)
    quiet.chat_template += "{% if add_generation_prompt and quiet %}(hush){% endif %}"
    config = config_of(run="sample_agents:two_turns")
    data = config.data.model_copy(update={"chat_template_arguments": {"quiet": True}})
    with Maker(quiet, RandomPolicy(quiet), config.model_copy(update={"data": data})) as maker:
        (sample,) = maker.make().episode
    assert quiet.decode(sample.prompt.token_ids).endswith("assistant\n(hush)")
    assert quiet.decode(sample.response_ids).count("assistant\n(hush)") == 1


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"run": "sample_agents:asks_nothing"}, "asked the policy nothing"),
        ({"run": "sample_agents:fails_after_a_turn"}, "of the agent's own"),
        ({"run": "sample_agents:hangs_after_a_turn", "timeout_seconds": 0.5}, "longer than 0.5 seconds"),
        ({"run": "sample_agents:hangs_in_its_thread", "timeout_seconds": 0.5}, "longer than 0.5 seconds"),
        ({"run": "sample_agents:reports_nonsense"}, "it may have answer, correct, reward, turn_rewards"),
        ({"run": "sample_agents:rewards_its_turns", "options": {"unknown": True}}, "id of no answer"),
        ({"command": [*PROGRAM, "fail"]}, "exit code 1: no luck"),
        pytest.param(
            {"command": [*PROGRAM, "hang"], "timeout_seconds": 8.0}, "longer than 8 seconds", marks=pytest.mark.slow
        ),
    ],
)
def test_an_agent_that_fails_costs_its_episode_and_leaves_nothing_behind(tokenizer, agent, message):
    before = {process.pid for process in psutil.Process().children()}
    with Maker(tokenizer, RandomPolicy(tokenizer), config_of(**agent)) as maker:
        with pytest.raises(Exception, match=message):
            maker.make()
        metrics = maker.maker.take_metrics()
    assert metrics["agent/failures_count"] == 1
    assert metrics["agent/timeouts_count"] == float("longer than" in message)
    assert {process.pid for process in psutil.Process().children()} <= before


def test_requests_for_json_are_served_where_the_section_says_so(tokenizer):
    agent = {"run": "sample_agents:asks_for_json"}
    with Maker(tokenizer, RandomPolicy(tokenizer), config_of(**agent, response_format="unenforced")) as maker:
        assert maker.make()
    refuses = pytest.raises(Exception, match="sampled without a grammar")
    with Maker(tokenizer, RandomPolicy(tokenizer), config_of(**agent)) as maker, refuses:
        maker.make()


def test_a_program_that_is_there_and_cannot_be_started_costs_its_episode(tokenizer, tmp_path):
    program = tmp_path / "agent"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    with Maker(tokenizer, RandomPolicy(tokenizer), config_of(command=[str(program)])) as maker:
        with pytest.raises(Exception, match="cannot be started"):
            maker.make()
        assert maker.maker.take_metrics()["agent/failures_count"] == 1


def test_a_failure_can_have_a_reward_and_is_trained_then(tokenizer):
    settings = {"run": "sample_agents:fails_after_a_turn", "failure_reward": -1.0}
    with Maker(tokenizer, RandomPolicy(tokenizer), config_of(**settings)) as maker:
        (sample,) = maker.make().episode
        assert maker.maker.take_metrics()["agent/failures_count"] == 1
        again = maker.make(request_of("g-001")).episode
    assert (sample.reward.score, sample.reward.correct) == (-1.0, False)
    assert "KeyError" in sample.reward.reason and len(again) == 1


def test_turns_have_the_rewards_that_the_agent_reports_for_their_answers(tokenizer):
    with Maker(tokenizer, RandomPolicy(tokenizer), config_of(run="sample_agents:rewards_its_turns")) as maker:
        episode = maker.make().episode
    turns = {turn.number: turn.reward for sample in episode for turn in sample.turns}
    assert turns == {0: 0.25, 1: 0.25, 2: -1.0, 3: None}
    assert {(sample.reward.score, sample.reward.correct) for sample in episode} == {(2.0 + 2 * 0.25 - 1.0, True)}


class Interrupted(RandomPolicy):
    """Answers the second request as aborted, with the first of its tokens, as often as it is told."""

    aborts = 1

    async def generate(self, request):
        generation = await super().generate(request)
        begun = len(request.partial.token_ids)
        rest = replace(
            generation,
            token_ids=request.partial.token_ids + generation.token_ids[begun:],
            logprobs=request.partial.logprobs + generation.logprobs[begun:],
            versions=(*request.partial.versions, VersionSpan(self.version, len(generation.token_ids) - begun)),
        )
        self.written.pop()
        if len(self.written) == 1 and self.aborts:
            self.aborts -= 1
            one = PartialResponse(rest.token_ids[:1], rest.logprobs[:1], (VersionSpan(self.version, 1),))
            return Generation(request.request_id, one.token_ids, one.logprobs, Status.ABORTED, one.versions, 0, 0.0, 0)
        self.written.append(Written(request.prompt_ids, rest))
        return rest


def test_an_interrupted_agent_waits_and_goes_on_in_the_middle_of_its_response(tokenizer):
    policy = Interrupted(tokenizer)
    with Maker(tokenizer, policy, config_of(partial=True, run="sample_agents:two_turns")) as maker:
        stopped = maker.make()
        assert stopped.episode is None
        assert len(stopped.partial.token_ids) == len(policy.written[0].generation.token_ids) + 1
        policy.version = 2
        (sample,) = maker.make(request_of(), stopped.partial).episode
        assert maker.maker.take_metrics()["agent/interruptions_count"] == 1
    assert [span.version for span in sample.versions] == [1, 2]
    assert sample.versions[1].tokens == len(policy.written[1].generation.token_ids) - 1
    assert_trained_once_as_sampled([sample], policy.written)


def test_an_interrupted_agent_begins_anew_where_its_beginning_is_too_old_or_not_kept(tokenizer):
    for partial in (True, False):
        policy = Interrupted(tokenizer)
        with Maker(tokenizer, policy, config_of(partial=partial, run="sample_agents:two_turns")) as maker:
            stopped = maker.make()
            assert stopped.episode is None and bool(stopped.partial.token_ids) == partial
            (sample,) = maker.make().episode
        assert len(policy.written) == 3
        assert_trained_once_as_sampled([sample], policy.written[1:])


def test_interrupting_reaches_agents_between_their_requests(tokenizer):
    policy = RandomPolicy(tokenizer)
    settings = config_of(partial=True, run="sample_agents:hangs_after_a_turn")

    async def abort():
        return

    with Maker(tokenizer, policy, settings) as maker:
        made = maker.start()
        while not policy.written:
            asyncio.run(asyncio.sleep(0.01))
        maker.loop.submit(maker.maker.interrupt(abort)).result(WAIT_SECONDS)
        stopped = made.result(WAIT_SECONDS)
        assert stopped.episode is None and stopped.partial.token_ids == policy.written[0].generation.token_ids


def test_agents_that_wait_for_a_place_do_not_begin_after_an_interruption(tokenizer):
    policy = RandomPolicy(tokenizer)
    settings = config_of(partial=True, run="sample_agents:hangs_after_a_turn", concurrency=1)

    async def abort():
        return

    with Maker(tokenizer, policy, settings) as maker:
        made = [maker.start(request_of(f"g-{number:03d}")) for number in range(3)]
        while not policy.written:
            asyncio.run(asyncio.sleep(0.01))
        maker.loop.submit(maker.maker.interrupt(abort)).result(WAIT_SECONDS)
        assert [one.result(WAIT_SECONDS).episode for one in made] == [None] * 3
    assert len(policy.written) == 1


def test_an_error_of_the_engines_ends_the_run_and_not_the_episode(tokenizer):
    policy = RandomPolicy(tokenizer)

    async def broken(request):
        raise RolloutError("no engine is left")

    policy.generate = broken
    settings = config_of(run="sample_agents:two_turns")
    with Maker(tokenizer, policy, settings) as maker, pytest.raises(RolloutError, match="no engine is left"):
        maker.make()


def test_what_cannot_be_run_is_refused_at_the_start():
    for agent, message in (
        ({"run": "no_such_module:f"}, "cannot import"),
        ({"run": "sample_agents:two_turns", "options": {"rewards": 1}}, "with the options"),
        ({"command": ["/no/such/agent"]}, "'/no/such/agent' is no program that can be run here"),
        ({"command": [__file__]}, "is no program that can be run here"),
    ):
        with pytest.raises(ConfigError, match=message):
            episode_maker(config_of(**agent))
    for agent in ({}, {"run": "a:b", "command": ["c"]}, {"command": ["c"], "options": {"a": 1}}):
        with pytest.raises(ValueError, match="rollout.generate.agent"):
            config_of(**agent)


def test_agents_beyond_the_limit_wait(tokenizer):
    policy = RandomPolicy(tokenizer, seconds=0.02)
    with Maker(tokenizer, policy, config_of(run="sample_agents:two_turns", concurrency=2)) as maker:
        most = 0
        started = [maker.start(request_of(f"g-{number:03d}")) for number in range(8)]
        while not all(one.done() for one in started):
            most = max(most, len(maker.maker._running))
            asyncio.run(asyncio.sleep(0.005))
        assert all(len(one.result().episode) == 1 for one in started)
    assert most == 2


class Asked(RandomPolicy):
    """Remembers the requests."""

    def answer(self, request):
        self.requests = [*getattr(self, "requests", []), request]
        return super().answer(request)


def test_engines_are_told_what_is_urgent_and_what_is_spare(tokenizer):
    policy = Asked(tokenizer)
    with Maker(tokenizer, policy, config_of(run="sample_agents:two_turns")) as maker:
        maker.make(replace(request_of(), urgent=True, spare=True))
    assert [(one.urgent, one.spare) for one in policy.requests] == [(True, True)] * 2


def test_the_time_of_an_agent_goes_on_after_an_interruption(tokenizer):
    policy = Interrupted(tokenizer, seconds=0.3)
    with Maker(tokenizer, policy, config_of(partial=True, run="sample_agents:two_turns")) as maker:
        maker.make()
        (running,) = maker.maker._suspended.values()
        assert running.left_seconds < maker.maker._settings.timeout_seconds - 0.5


def test_an_evaluation_has_a_prompt_column_of_its_own(tokenizer):
    held_out = {"name": "held", "path": "unused", "prompt_column": "task"}
    settings = config_of(run="sample_agents:two_turns").model_dump() | {"eval": {"datasets": [held_out]}}
    prompt = Prompt("held/0", "rendered", (1,), "42", "held", {"task": "Why?"})
    with Maker(tokenizer, RandomPolicy(tokenizer), Config.model_validate(settings)) as maker:
        (sample,) = maker.make(PromptRequest("e-000", "e", prompt, SamplingParameters(512))).episode
    assert "Why?" in tokenizer.decode(sample.prompt.token_ids)


def test_each_agent_has_a_seed_of_its_own_that_recurs(tokenizer):
    with Maker(tokenizer, RandomPolicy(tokenizer), config_of(run="sample_agents:two_turns")) as maker:
        first, other, again = [maker.maker._task(request_of(f"g-00{n}"), "", "").seed for n in (0, 1, 0)]
    assert first == again != other


@pytest.mark.parametrize("verdict", [True, False])
def test_an_agent_that_says_whether_it_was_right_is_graded_so(verdict):
    reward = report_of(verdict).reward
    assert (reward.score, reward.correct) == (float(verdict), verdict)
