"""Conversations that find their cache: prefix hits with turns kept on their engine, beside one engine and beside none.

Conversations of several turns on a small dense policy, a tool's answer between two turns after a random while. `hits`
is the share of prompt tokens that an engine had in its cache; `of one engine` compares it with that of one engine that
serves all of them. `computed` are the other prompt tokens.

    python benchmarks/prefix_routing.py [--conversations 64] [--turns 6] [--engines 2]
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from random_policy import save_random_policy

from rlpipe.config.root import Config
from rlpipe.training.ray_cluster import ray_cluster
from rollout.client import EngineClient
from rollout.dispatch import RoutingCounts
from rollout.pool import RolloutPool
from rollout.requests import EngineUsage, GenerateRequest, SamplingParameters, sample_seed

_PROMPT_TOKENS, _TOOL_TOKENS, _NEW_TOKENS = 96, 24, 32
_TOOL_SECONDS = 0.2  # at most
_ANSWER_SECONDS = 600.0
_POLICY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 256,
    "pad_token_id": 257,
}


@dataclass(frozen=True)
class Measured:
    """Of all conversations together."""

    usage: tuple[EngineUsage, ...]
    routing: RoutingCounts
    seconds: float

    @property
    def prompt_tokens(self) -> int:
        return sum(one.prompt_tokens for one in self.usage)

    @property
    def cached_tokens(self) -> int:
        return sum(one.cached_tokens for one in self.usage)

    @property
    def hit_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--engines", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ray_cluster(_config(options.engines, "prefix", options)):
        policy = save_random_policy(_POLICY, Path(folder) / "policy", "float32")
        kinds = {
            "one engine": (1, "prefix"),
            f"{options.engines} engines, prefix": (options.engines, "prefix"),
            f"{options.engines} engines, least_loaded": (options.engines, "least_loaded"),
        }
        print(f"{options.conversations} conversations of {options.turns} turns")
        print(f"{'':26}{'hits':>8}{'of one engine':>15}{'computed':>10}{'saved':>9}{'moved turns':>13}{'seconds':>9}")
        alone: Measured | None = None
        for name, (engines, routing) in kinds.items():
            measured = measure(_config(engines, routing, options), policy, folder, options)
            alone = alone or measured
            computed = measured.prompt_tokens - measured.cached_tokens
            print(
                f"{name:26}{measured.hit_share:8.1%}{measured.hit_share / alone.hit_share:15.1%}{computed:10,}"
                f"{measured.cached_tokens:9,}{measured.routing.moved_turns:13}{measured.seconds:9.1f}",
                flush=True,
            )


def measure(config: Config, policy: str, folder: str, options: argparse.Namespace) -> Measured:
    """All conversations once, on engines of their own."""
    with RolloutPool.start(config, policy, log_directory=os.path.join(folder, "logs")) as pool:
        pool.wait_until_ready()
        client = pool.client()
        begin = time.perf_counter()
        try:
            asyncio.run(asyncio.wait_for(_converse(client, options), _ANSWER_SECONDS))
        finally:
            client.close()
        return Measured(pool.take_usage(), client.take_routing(), time.perf_counter() - begin)


async def _converse(client: EngineClient, options: argparse.Namespace) -> None:
    async def one(name: str) -> None:
        numbers = random.Random(name)
        text = tuple(numbers.randrange(256) for _ in range(_PROMPT_TOKENS))
        for turn in range(options.turns):
            sampling = SamplingParameters(_NEW_TOKENS, ignore_eos=True)
            request = GenerateRequest(f"{name}.{turn}", text, sampling, sample_seed(0, name), conversation_id=name)
            text += tuple((await client.generate(request)).token_ids)
            text += tuple(numbers.randrange(256) for _ in range(_TOOL_TOKENS))
            await asyncio.sleep(numbers.uniform(0, _TOOL_SECONDS))

    await asyncio.gather(*(one(f"c{index}") for index in range(options.conversations)))


def _config(engines: int, routing: str, options: argparse.Namespace) -> Config:
    longest = options.turns * (_TOOL_TOKENS + _NEW_TOKENS)
    return Config.model_validate(
        {
            "run": {"name": "benchmark", "iterations": 1},
            "model": {"path": "unused"},
            "ray": {"cpus": options.engines},
            "data": {"train": [{"name": "none", "path": "unused"}], "max_prompt_tokens": _PROMPT_TOKENS},
            "actor": {"max_tokens_per_gpu": _PROMPT_TOKENS + longest},
            "rollout": {
                "engines": engines,
                "request_routing": routing,
                "max_response_tokens": longest,
                "engine": {"dtype": "float32", "max_running_requests": options.conversations},
            },
        }
    )


if __name__ == "__main__":
    main()
