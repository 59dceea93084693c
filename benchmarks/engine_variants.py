"""An engine with another setting beside one without it: the same requests, in turns, at several numbers at a time.

The policy has the shape of Qwen3.5-35B-A3B's first layers. Its weights are random, but for embedding, head and the
input of the prediction layer, by which the next token is known over half of the time: a draft of random weights
would never be kept. `--policy FOLDER` takes a trained one in its place.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from layer_shapes import hybrid_config
from random_policy import save_random_policy
from rollout_requests import make_requests

from rlpipe.config.root import Config
from rlpipe.training.placement import placements
from rlpipe.training.ray_cluster import ray_cluster
from rollout.pool import RolloutPool
from rollout.requests import GenerateRequest, Generation

_PROMPT_TOKENS = 64
_VOCABULARY = 32768
_LAYERS = 8
_SECONDS = 600.0


def compare_variants(options: argparse.Namespace, engine: dict[str, Any], name: str) -> None:
    """Prints tokens per second with `engine`, settings of rollout.engine called `name`, and without."""
    plain, varied = _config(options, {}), _config(options, engine)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as opened:
        folder = options.policy or save_random_policy(
            hybrid_config(options.hybrid_layers or _LAYERS, _VOCABULARY, tiny=False) | {"mtp_num_hidden_layers": 1},
            Path(scratch) / "policy",
            "bfloat16",
            known_next=True,
        )
        opened.enter_context(ray_cluster(plain))
        places = opened.enter_context(placements(plain))
        pools = {
            label: opened.enter_context(RolloutPool.start(config, folder, place, log_directory=f"{scratch}/{label}"))
            for (label, config), place in zip({"without": plain, name: varied}.items(), places, strict=True)
        }
        for pool in pools.values():
            pool.wait_until_ready()
        _measure_all(pools, options, name)


def _measure_all(pools: dict[str, RolloutPool], options: argparse.Namespace, name: str) -> None:
    print(f"{options.tokens} tokens each, temperature 1", flush=True)
    print(f"{'at a time':>10}{'without':>14}{name:>14}{'ratio':>8}{'tokens a pass':>15}", flush=True)
    for count in options.concurrency:
        requests = make_requests(count, options.tokens)
        rates: dict[str, list[float]] = {label: [] for label in pools}
        answers: list[Generation] = []
        for turn in range(options.rounds + 1):
            for label, pool in pools.items():
                begin = time.perf_counter()
                answers = asyncio.run(_answers(pool, requests))
                seconds = time.perf_counter() - begin
                if turn:  # the first turn warms both up
                    rates[label].append(sum(len(one.token_ids) for one in answers) / seconds)
        without, varied = (statistics.median(values) for values in rates.values())
        print(
            f"{count:>10}{without:>14,.0f}{varied:>14,.0f}{varied / without:>8.2f}{_pass_tokens(answers):>15.2f}",
            flush=True,
        )


async def _answers(pool: RolloutPool, requests: list[GenerateRequest]) -> list[Generation]:
    client = pool.client()
    try:
        return await asyncio.wait_for(asyncio.gather(*map(client.generate, requests)), _SECONDS)
    finally:
        client.close()


def _pass_tokens(answers: list[Generation]) -> float:
    """Tokens of a pass over a request."""
    passes: Counter[int] = Counter()
    for answer in answers:
        passes.update(dict(enumerate(answer.kept_drafts)))
    return 1 + sum(kept * count for kept, count in passes.items()) / (passes.total() or 1)


def _config(options: argparse.Namespace, engine: dict[str, Any]) -> Config:
    most = max(options.concurrency)
    return Config.model_validate(
        {
            "run": {"name": "variants", "iterations": 1},
            "model": {"path": "unused"},
            "data": {"train": [{"name": "none", "path": "unused"}], "max_prompt_tokens": _PROMPT_TOKENS},
            "actor": {"max_tokens_per_gpu": _PROMPT_TOKENS + options.tokens},
            "ray": {"colocate": True, "sleep": "never"},
            "jit": {"warm_up": "off"},
            "rollout": {
                "max_response_tokens": options.tokens,
                "engine": {
                    "dtype": "bfloat16",
                    "max_running_requests": most,
                    "memory_fraction": 0.4,
                    "deterministic": options.deterministic,
                }
                | engine,
            },
        }
    )
