"""Agents in front of a real engine: trained tokens and log-probabilities are those that it answered, bit by bit."""

import asyncio
import random
from collections import Counter

import pytest
from agent_support import TOOLS, serving
from random_policy_engine import TEXTS, Written, assert_trained_once_as_sampled

from rlpipe.config.model import TinyPolicyConfig
from rlpipe.config.root import Config
from rlpipe.prepare.tiny_policy import make_tiny_policy
from rlpipe.prepare.tokenizer import byte_tokenizer
from rollout.pool import RolloutPool


class Recorded:
    """A client of engines that remembers what they saw and answered."""

    def __init__(self, client) -> None:
        self.client, self.written = client, []

    async def generate(self, request):
        generation = await self.client.generate(request)
        self.written.append(Written(request.prompt_ids, generation))
        return generation


@pytest.fixture(scope="module")
def pool(ray_session, tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents") / "policy"
    make_tiny_policy(TinyPolicyConfig(hidden_size=32, layers=1, heads=2, key_value_heads=1, head_dim=16), folder, 0)
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
    assert len(engines.written) == 8 * 4
    assert counts["continued_requests"] > 0 and any(len(episode) > 2 for episode in episodes)
    assert_trained_once_as_sampled([sample for episode in episodes for sample in episode], engines.written)
