"""Engines with other settings beside one without them: the same requests, in turns, at several numbers at a time.

The policy has the shape of Qwen3.5-35B-A3B's first layers. Its weights are random, but for embedding, head and the
input of the prediction layer, by which the next token is known over half of the time: a draft of random weights
would never be kept. `--policy FOLDER` takes a trained one in its place, and `--rows FILE` its task's prompts, whose
responses end where the policy ends them.
"""

import argparse
import asyncio
import math
import statistics
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import ray
from inside_engine import begin_trace
from kernel_groups import print_trace
from layer_shapes import hybrid_config
from random_policy import save_random_policy
from ray.util import placement_group
from rollout_requests import make_requests

from rlpipe.config.data import DatasetConfig
from rlpipe.config.root import Config
from rlpipe.data.prompts import load_prompts, load_tokenizer
from rlpipe.shared.errors import RlpipeError
from rlpipe.training.placement import Placement, cluster_gpus
from rlpipe.training.ray_cluster import ray_cluster
from rollout.pool import RolloutPool
from rollout.requests import GenerateRequest, Generation, SamplingParameters, sample_seed

_PROMPT_TOKENS = 64
_VOCABULARY = 32768
_LAYERS = 8
_SECONDS = 600.0
_PLAIN = "without"
MEMORY_SHARE = 0.8
"""Of what is free, where pools have sizes: engines start at once, and each sees the others' weights as used."""
_PREFILL_SECONDS = 0.4
_PROFILED_STEPS = 40
_WAVES = 4
"""Of requests with prompts of a task, one after the other: their responses are short."""


FP8_VARIANTS: dict[str, dict[str, Any]] = {
    "fp8": {"quantization": "fp8"},
    "fp8+cache": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "fp8+cutlass": {"quantization": "fp8", "sglang": {"moe_runner_backend": "cutlass"}},
    "fp8_all": {"quantization": "fp8_all"},
    "fp8_all+cache": {"quantization": "fp8_all", "kv_cache_dtype": "fp8"},
}
"""Settings of rollout.engine that can be compared in one run."""


def draft_variants(methods: list[str], steps: list[int]) -> dict[str, dict[str, Any]]:
    """`mtp` with each number of steps; `auto` with the first."""
    chosen = {method: steps if method == "mtp" else steps[:1] for method in methods}
    return {
        method if len(steps) == 1 else f"{method}, {count} steps": {"draft": {"method": method, "steps": count}}
        for method, counts in chosen.items()
        for count in counts
    }


def compare_variants(options: argparse.Namespace, variants: dict[str, dict[str, Any]]) -> None:
    """Prints tokens per second with the settings of rollout.engine of each variant, and without any. A variant that
    does not start is said to be so."""
    configs = {_PLAIN: _config(options, {}, len(variants) + 1)} | {
        name: _config(options, engine, len(variants) + 1) for name, engine in variants.items()
    }
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as opened:
        folder = options.policy or save_random_policy(
            hybrid_config(options.hybrid_layers or _LAYERS, _VOCABULARY, tiny=False) | {"mtp_num_hidden_layers": 1},
            Path(scratch) / "policy",
            "bfloat16",
            known_next=True,
        )
        opened.enter_context(ray_cluster(configs[_PLAIN]))
        share = _shared_by(len(configs))
        started = {
            name: opened.enter_context(RolloutPool.start(config, folder, share, log_directory=f"{scratch}/{index}"))
            for index, (name, config) in enumerate(configs.items())
        }
        pools = {name: pool for name, pool in started.items() if _is_ready(name, pool)}
        prompts = _prompts(folder, options.rows) if options.rows else []
        _measure_all(pools, options, prompts)
        if options.profile:
            _profile_all(pools, options, prompts, Path(scratch))


def _prompts(folder: str, rows: str) -> list[tuple[int, ...]]:
    """Token ids of the prompts in this file, as a run with this policy makes them."""
    dataset = DatasetConfig(name="rows", path=rows)
    loaded = load_prompts([dataset], load_tokenizer(folder), _PROMPT_TOKENS, skip_bad_rows=False)
    return [tuple(prompt.token_ids) for prompt in loaded.prompts]


def _waves(count: int, tokens: int, prompts: list[tuple[int, ...]]) -> list[list[GenerateRequest]]:
    """Of `count` requests: one of forced length, or several with a task's prompts, which end where the policy ends
    them."""
    if not prompts:
        return [make_requests(count, tokens)]
    sampling, chosen = SamplingParameters(tokens), cycle(prompts)
    return [
        [GenerateRequest(name, next(chosen), sampling, sample_seed(7, name)) for name in _names(wave, count)]
        for wave in range(_WAVES)
    ]


def _names(wave: int, count: int) -> list[str]:
    return [f"w{wave}r{index}" for index in range(count)]


def _shared_by(engines: int) -> Placement:
    """A processor of each engine, and its share of one GPU."""
    gpus = min(1, cluster_gpus())
    group = placement_group([{"CPU": engines} | ({"GPU": gpus} if gpus else {})])
    ray.get(group.ready(), timeout=_SECONDS)
    return Placement(group, (0,), math.floor(1e3 * gpus / engines) / 1e3)


def _is_ready(name: str, pool: RolloutPool) -> bool:
    try:
        pool.wait_until_ready()
    except RlpipeError as error:
        print(f"{name}: did not start: {error}", flush=True)
        return False
    return True


def _measure_all(pools: dict[str, RolloutPool], options: argparse.Namespace, prompts: list[tuple[int, ...]]) -> None:
    at_most = "at most " if prompts else ""
    print(f"{at_most}{options.tokens} tokens each, temperature 1", flush=True)
    print(f"{'at a time':>10}  {'engine':20}{'tokens/s':>10}{'ratio':>8}{'tokens a pass':>15}", flush=True)
    for count in options.concurrency:
        waves = _waves(count, options.tokens, prompts)
        rates: dict[str, list[float]] = {label: [] for label in pools}
        passes: dict[str, float] = {}
        for turn in range(options.rounds + 1):
            for label, pool in pools.items():
                begin = time.perf_counter()
                answers = [one for wave in waves for one in asyncio.run(_answers(pool, wave))]
                seconds = time.perf_counter() - begin
                passes[label] = _pass_tokens(answers)
                if turn:  # the first turn warms all up
                    rates[label].append(sum(len(one.token_ids) for one in answers) / seconds)
        plain = statistics.median(rates[_PLAIN])
        for label, values in rates.items():
            rate = statistics.median(values)
            print(f"{count:>10}  {label:20}{rate:>10,.0f}{rate / plain:>8.2f}{passes[label]:>15.2f}", flush=True)


def _profile_all(
    pools: dict[str, RolloutPool], options: argparse.Namespace, prompts: list[tuple[int, ...]], scratch: Path
) -> None:
    """Kernels of decoding the most requests, by their kind. The trace begins when all are past their prompt."""
    count = max(options.concurrency)
    requests = _waves(count, options.tokens, prompts)[0]
    for index, (label, pool) in enumerate(pools.items()):
        trace = scratch / f"trace_{index}"
        with ThreadPoolExecutor(1) as beside:
            answered = beside.submit(asyncio.run, _answers(pool, requests))
            time.sleep(_PREFILL_SECONDS)
            begin_trace(pool.serving()[0], trace, _PROFILED_STEPS)
            answered.result()
        print(f"{label}, {count} at a time: ", end="")
        print_trace(trace, _PROFILED_STEPS)


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


def _config(options: argparse.Namespace, engine: dict[str, Any], engines: int) -> Config:
    most = max(options.concurrency)
    return Config.model_validate(
        {
            "run": {"name": "variants", "iterations": 1},
            "model": {"path": "unused"},
            "data": {"train": [{"name": "none", "path": "unused"}], "max_prompt_tokens": _PROMPT_TOKENS},
            "actor": {"max_tokens_per_gpu": _PROMPT_TOKENS + options.tokens},
            "ray": {"colocate": True, "sleep": "never", "cpus": engines + 1},
            "jit": {"warm_up": "off"},
            "rollout": {
                "max_response_tokens": options.tokens,
                "engine": {
                    "dtype": "bfloat16",
                    "max_running_requests": most,
                    "memory_fraction": 0.4 if engines == 2 else MEMORY_SHARE,
                    "deterministic": options.deterministic,
                }
                | engine,
            },
        }
    )
