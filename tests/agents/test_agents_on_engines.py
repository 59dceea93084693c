"""Agents in front of a real engine: trained tokens and log-probabilities are those that it answered, bit by bit."""

import asyncio
import random
from collections import Counter, defaultdict

import pytest
from agent_support import TOOLS, serving
from random_policy_engine import TEXTS, RandomPolicy, Written, assert_trained_once_as_sampled
from taught_policy import make_taught_policy
from test_agent_maker import Maker, config_of, request_of

from rlpipe.config.root import Config
from rlpipe.prepare.tokenizer import byte_tokenizer
from rollout.pool import RolloutPool

CALL = '<tool_call>\n{"name": "add", "arguments": {"first": 17, "second": 25}}\n</tool_call>'
ANSWER = "It is 42."
LIBRARY = config_of(run="library_agent:with_openai_agents", failure_reward=0.0)


class Adds(RandomPolicy):
    """Has the library's tool add, and tells the sum."""

    def text(self, numbers):
        return ANSWER if self.written else CALL

    def broken_text(self, numbers):
        return []


class Recorded:
    """A client of engines that remembers what they saw and answered, episode by episode."""

    def __init__(self, client) -> None:
        self.client, self.written = client, defaultdict(list)

    async def generate(self, request):
        generation = await self.client.generate(request)
        self.written[request.conversation_id].append(Written(request.prompt_ids, generation))
        return generation

    def assert_trained(self, episodes) -> None:
        for episode in episodes:
            assert_trained_once_as_sampled(episode, self.written.pop(episode[0].episode))
        assert not self.written


@pytest.fixture(scope="module")
def pool(ray_session, tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents") / "policy"
    with Maker(byte_tokenizer(), Adds(byte_tokenizer()), LIBRARY) as maker:
        (taught,) = maker.make().episode
    make_taught_policy(folder, taught)
    config = Config.model_validate(
        {
            "run": {"name": "agents", "iterations": 1},
            "model": {"path": str(folder)},
            "data": {"train": [{"name": "none", "path": "unused"}], "max_prompt_tokens": 3000},
            "rollout": {
                "max_response_tokens": 1000,
                "engine": {"dtype": "float32", "max_running_requests": 8},
                "generate": {"function": "agent", "agent": {"run": "sample_agents:two_turns"}},
            },
        }
    )
    with RolloutPool.start(config, str(folder), log_directory=str(folder.parent)) as pool:
        pool.wait_until_ready()
        yield pool


async def dialogue(served, numbers: random.Random) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": numbers.choice(TEXTS)}]
    for turn in range(3):
        answer = await served.chat(
            messages, tools=TOOLS, max_tokens=numbers.randint(4, 24), n=1 + (turn == 1), stop=["e"], logprobs=True
        )
        for choice in answer.choices:
            assert len(choice.logprobs.content) > 0
        messages += [numbers.choice(answer.choices).message, {"role": "user", "content": numbers.choice(TEXTS)}]
        if numbers.random() < 0.3:
            messages[1] = {"role": "user", "content": "edited"}


def test_trained_tokens_are_those_that_the_engine_answered(pool):
    tokenizer, counts = byte_tokenizer(), Counter()
    engines = Recorded(pool.client())

    async def run():
        async with serving(tokenizer, engines, limit=4000, counts=counts) as open_episode:
            episodes = [open_episode(f"g-{number:03d}") for number in range(8)]
            await asyncio.gather(*(dialogue(one, random.Random(seed)) for seed, one in enumerate(episodes)))
            return [one.episode.samples() for one in episodes]

    episodes = asyncio.run(run())
    engines.client.close()
    assert [len(written) for written in engines.written.values()] == [4] * 8
    assert counts["continued_requests"] > 0 and any(len(episode) > 2 for episode in episodes)
    engines.assert_trained(episodes)


def test_a_library_s_agent_has_its_tool_run_and_its_tokens_are_the_engine_s(pool):
    """An unmodified agent of OpenAI's Agents SDK, on an engine whose policy knows how to call its tool."""
    engines = Recorded(pool.client())
    with Maker(byte_tokenizer(), engines, LIBRARY) as maker:
        started = [maker.start(request_of(f"g-{number:03d}")) for number in range(6)]
        episodes = [one.result().episode for one in started]
        metrics = maker.maker.take_metrics()
    engines.client.close()
    told = [episode[0] for episode in episodes if episode[-1].response_text == ANSWER and len(episode) == 1]
    assert told and all(len(sample.turns) >= 2 for sample in told)
    assert metrics["agent/tool_calls_count"] >= len(told)
    asked = sum(map(len, engines.written.values()))
    assert metrics["agent/continued_requests_count"] == asked - len(episodes) > 0
    engines.assert_trained(episodes)
