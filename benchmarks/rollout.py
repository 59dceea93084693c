"""Pool against raw SGLang: the same prompts on the same kind of engine, in turns, both figures printed.

    python benchmarks/rollout.py [--prompts 64] [--tokens 64] [--rounds 5]
    python benchmarks/rollout.py --hybrid-layers 8 --prompts 128 --tokens 2048 --rounds 2 --profile
    python benchmarks/rollout.py --hybrid-layers 8 --ablate --prompts 128 --tokens 1024 --rounds 2
    python benchmarks/rollout.py --model Qwen3-1.7B --samples 8      a whole model with its own vocabulary, groups
    python benchmarks/rollout.py --draft mtp auto [--policy FOLDER --rows FILE] [--concurrency 1 16 128] [--steps 3 5]
                                                            a GPU; see engine_variants
    python benchmarks/rollout.py --quantization fp8 fp8_all [--profile]                     likewise

Raw means `sglang.Engine.generate` with one list of prompts inside the engine's process, without seeds, padding, Ray
between requests, or streaming. Both engines live side by side (on a GPU both in its memory) and work one after the
other. On a GPU the model has the shape of Qwen3-0.6B, or of the first layers of Qwen3.5-35B-A3B, and decoding runs in
CUDA graphs; on a CPU it is tiny. --sglang KEY=VALUE is given to both engines; --profile shows where the GPU's time of
decoding goes, of each engine where variants are compared.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "rollout"))

import psutil
import ray
import torch
import yaml
from engine_variants import FP8_VARIANTS, MEMORY_SHARE, compare_variants, draft_variants
from kernel_groups import print_trace
from layer_shapes import hybrid_config, qwen3_config
from random_policy import save_random_policy
from raw_engine import runnable_attention, start_raw
from rollout_ablation import VARIANTS, AblationSizes, ablate, through_pool
from rollout_requests import make_requests
from whole_step_setup import MODELS

from rlpipe.config.root import Config
from rlpipe.training.placement import Placement, placements
from rlpipe.training.ray_cluster import ray_cluster
from rollout.pool import RolloutPool
from rollout.requests import GenerateRequest

_PROMPT_TOKENS = 64
_SHARED_PROMPT_TOKENS = 128  # enough for the pool to compute it once, before the samples
_PROFILED_STEPS = 60
_VOCABULARY = 32_768
_ABLATED_STEPS = 300  # enough for requests to pass a multiple of 256 tokens, where SGLang keeps their states
_STATES_PER_REQUEST = 5
"""Room for recurrent states of raw SGLang, as the pool's."""


@dataclass(frozen=True)
class Sizes:
    """What is measured on a device, unless options say otherwise.

    sglang: arguments of both engines. memory: the share of device memory that each may fill; it takes only what
    `kv_cache_tokens` need.
    """

    tiny: bool
    dtype: str
    prompts: int
    tokens: int
    rounds: int
    sglang: dict[str, Any]
    memory: float

    def kv_cache_tokens(self, options: argparse.Namespace) -> int:
        return options.prompts * (_most_prompt_tokens(options) + options.tokens + 8)


ON_GPU = Sizes(
    tiny=False,
    dtype="bfloat16",
    prompts=256,
    tokens=512,
    rounds=4,
    sglang=runnable_attention(),
    memory=0.35,
)
ON_CPU = Sizes(tiny=True, dtype="float32", prompts=64, tokens=64, rounds=5, sglang={}, memory=0.2)


def _raw_arguments(folder: str, sizes: Sizes, options: argparse.Namespace) -> dict[str, Any]:
    """Of SGLang's Engine, with the flags that the device needs; without a size, states fill what is free."""
    on_cpu = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
    }
    on_gpu = {
        "device": "cuda",
        "disable_prefill_cuda_graph": True,
        "cuda_graph_max_bs_decode": options.prompts,
    }
    states = {"max_mamba_cache_size": _STATES_PER_REQUEST * options.prompts} if options.hybrid_layers else {}
    common = {
        "model_path": folder,
        "grammar_backend": "none",
        "dtype": sizes.dtype,
        "max_total_tokens": sizes.kv_cache_tokens(options),
        "max_running_requests": options.prompts,
        "mem_fraction_static": sizes.memory,
        "skip_server_warmup": True,
        "skip_tokenizer_init": True,
        "log_level": "warning",
        "sleep_on_idle": True,  # without it, it takes a core from the pool while that works
    }
    return common | states | (on_gpu if torch.cuda.is_available() else on_cpu) | sizes.sglang


def main() -> None:
    sizes = ON_GPU if torch.cuda.is_available() else ON_CPU
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("prompts", "tokens", "rounds"):
        parser.add_argument(f"--{name}", type=int, default=getattr(sizes, name))
    parser.add_argument(
        "--samples", type=int, default=1, help="of each prompt, so many of the requests, as a run of GRPO has them"
    )
    parser.add_argument("--deterministic", action="store_true", help="the pool's samples do not depend on their batch")
    parser.add_argument("--hybrid-layers", type=int, default=0, help="of Qwen3.5-35B-A3B's shape; 0: a dense model")
    parser.add_argument("--model", help="a whole model of configs/models, with random weights, in place of these")
    parser.add_argument("--sglang", action="append", default=[], metavar="KEY=VALUE", help="for both engines")
    parser.add_argument("--profile", action="store_true", help="raw SGLang's decoding by kind of kernel")
    parser.add_argument(
        "--ablate", action="store_true", help="what the pool adds, piece by piece; see rollout_ablation"
    )
    parser.add_argument(
        "--variant", choices=VARIANTS, default=next(iter(VARIANTS)), help="with --ablate: a second pool"
    )
    parser.add_argument("--brief", action="store_true", help="with --ablate: raw SGLang and one pool alone")
    parser.add_argument("--at", type=int, nargs="+", help="with --ablate: so many of the prompts at a time")
    parser.add_argument("--draft", choices=("mtp", "auto"), nargs="+", help="engines that draft beside one without")
    parser.add_argument("--quantization", choices=tuple(FP8_VARIANTS), nargs="+", help="engines in 8 bits, likewise")
    parser.add_argument("--policy", help="of variants: folder of the policy")
    parser.add_argument("--rows", help="of variants: file with prompts of the policy's task")
    parser.add_argument("--steps", type=int, nargs="+", default=[3], help="with --draft: tokens of a draft")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 128], help="of variants: requests")
    options = parser.parse_args()
    if options.draft or options.quantization:
        if options.model or options.samples > 1:
            parser.error("--draft and --quantization take no --model and no --samples")
        variants = {one: FP8_VARIANTS[one] for one in options.quantization or ()}
        variants |= draft_variants(options.draft or [], options.steps)
        compare_variants(options, variants)
        return
    if options.model and options.hybrid_layers:
        parser.error("--model and --hybrid-layers are two policies: give one")
    if options.prompts % options.samples:
        parser.error(f"--prompts {options.prompts} is no multiple of --samples {options.samples}")
    if options.hybrid_layers and not torch.cuda.is_available():
        parser.error("--hybrid-layers needs a GPU: SGLang by itself runs Gated DeltaNet there only")
    given = dict(one.split("=", 1) for one in options.sglang)
    memory = MEMORY_SHARE if options.ablate or options.hybrid_layers else sizes.memory
    sizes = replace(
        sizes, memory=memory, sglang=sizes.sglang | {key: yaml.safe_load(value) for key, value in given.items()}
    )
    config = _config(sizes, options)
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_random_policy(_shape(sizes, options), Path(scratch) / "policy", sizes.dtype)
        with ray_cluster(config), placements(config) as (raw_place, pool_place):
            print(f"{options.prompts} prompts x {options.tokens} tokens, {sizes.dtype}", flush=True)
            if options.ablate:
                _ablate(folder, config, sizes, options, (raw_place, pool_place))
            else:
                _compare(folder, config, sizes, options, raw_place, pool_place)


def _ablate(
    folder: str, config: Config, sizes: Sizes, options: argparse.Namespace, places: tuple[Placement, Placement]
) -> None:
    requests = _requests(options)
    steps = _ABLATED_STEPS if options.profile else 0
    at_a_time = options.at or [options.prompts]
    wanted = AblationSizes(options.tokens, options.rounds, at_a_time, options.brief, steps)
    # Recurrent states of 512 requests of 8 layers leave no room for a third engine on 141 GB.
    variants = [] if options.brief else [options.variant]
    ablate(folder, config, requests, wanted, _raw_arguments(folder, sizes, options), variants, places)


def _requests(options: argparse.Namespace) -> list[GenerateRequest]:
    """Of short prompts, each another; or of longer ones, each asked for several samples."""
    requests = make_requests(options.prompts, options.tokens)
    if options.samples == 1:
        return requests
    numbers, grouped = random.Random(0), []
    for first in range(0, options.prompts, options.samples):
        prompt = tuple(numbers.randrange(256) for _ in range(_SHARED_PROMPT_TOKENS))
        samples = requests[first : first + options.samples]
        grouped += [replace(one, prompt_ids=prompt, group_id=f"g{first}") for one in samples]
    return grouped


def _most_prompt_tokens(options: argparse.Namespace) -> int:
    return _PROMPT_TOKENS if options.samples == 1 else _SHARED_PROMPT_TOKENS


def _shape(sizes: Sizes, options: argparse.Namespace) -> dict[str, Any]:
    if options.model:
        config: dict[str, Any] = json.loads((MODELS / options.model / "config.json").read_text())
        return config
    if not options.hybrid_layers:
        return qwen3_config(sizes.tiny)
    return hybrid_config(options.hybrid_layers, 320 if sizes.tiny else _VOCABULARY, sizes.tiny)


@dataclass(frozen=True)
class Measurement:
    """One round of one contender. CPU seconds are those of all its processes: on a busy machine they say more."""

    tokens: int
    wall_seconds: float
    cpu_seconds: float


def _compare(
    folder: str, config: Config, sizes: Sizes, options: argparse.Namespace, raw_place: Placement, pool_place: Placement
) -> None:
    requests = _requests(options)
    prompts = [list(request.prompt_ids) for request in requests]
    sampling = _raw_sampling(options.tokens)
    with RolloutPool.start(config, folder, pool_place) as pool:
        engine = start_raw(raw_place, folder, _raw_arguments(folder, sizes, options))
        pool.wait_until_ready()
        contenders = {
            "raw SGLang": (
                [ray.get(engine.pid.remote())],
                lambda: ray.get(engine.generate.remote(prompts, sampling)),
            ),
            "RolloutPool": ([os.getpid(), *pool.worker_pids()], lambda: through_pool(pool, requests)),
        }
        rounds: dict[str, list[Measurement]] = {name: [] for name in contenders}
        for turn in range(options.rounds + 1):
            for name, (pids, generate) in contenders.items():
                measured = _measure(pids, generate)
                if turn:  # the first turn warms both up
                    rounds[name].append(measured)
        _report(rounds)
        if options.profile:
            _profile(engine, prompts, Path(folder).parent / "trace")
        ray.get(engine.stop.remote())


def _profile(engine: Any, prompts: list[list[int]], folder: Path) -> None:
    folder.mkdir()
    ray.get(engine.start_profile.remote(str(folder), _PROFILED_STEPS))
    ray.get(engine.generate.remote(prompts, _raw_sampling(2 * _PROFILED_STEPS)))
    print_trace(folder, _PROFILED_STEPS)


def _raw_sampling(tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}


def _measure(pids: list[int], generate: Callable[[], int]) -> Measurement:
    cpu, begin = _cpu_seconds(pids), time.perf_counter()
    tokens = generate()
    return Measurement(tokens, time.perf_counter() - begin, _cpu_seconds(pids) - cpu)


def _cpu_seconds(pids: list[int]) -> float:
    """Of these processes; of an engine's also its children's, of this process only its own."""
    processes = [psutil.Process(pid) for pid in pids]
    engines = [process for process in processes if process.pid != os.getpid()]
    processes += [child for engine in engines for child in engine.children(recursive=True)]
    return sum(process.cpu_times().user + process.cpu_times().system for process in processes)


def _report(rounds: dict[str, list[Measurement]]) -> None:
    print(f"{'':14}{'tokens per second':>30}{'tokens per CPU second':>30}")
    best = {}
    for name, measured in rounds.items():
        wall = [one.tokens / one.wall_seconds for one in measured]
        cpu = [one.tokens / one.cpu_seconds for one in measured]
        best[name] = (statistics.median(wall), statistics.median(cpu))
        print(f"{name:14}{_spread(wall):>30}{_spread(cpu):>30}")
    ratios = [pool / raw for pool, raw in zip(best["RolloutPool"], best["raw SGLang"], strict=True)]
    print(f"{'pool / raw':14}{ratios[0]:>30.1%}{ratios[1]:>30.1%}")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def _config(sizes: Sizes, options: argparse.Namespace) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "benchmark", "iterations": 1},
            "model": {"path": "unused"},
            "data": {"train": [{"name": "none", "path": "unused"}], "max_prompt_tokens": _most_prompt_tokens(options)},
            "actor": {"max_tokens_per_gpu": _most_prompt_tokens(options) + options.tokens},
            "ray": {"colocate": True, "sleep": "never"},
            "rollout": {
                "max_response_tokens": options.tokens,
                "engine": {
                    "dtype": sizes.dtype,
                    "max_running_requests": options.prompts,
                    "kv_cache_tokens": sizes.kv_cache_tokens(options),
                    "memory_fraction": sizes.memory,
                    "deterministic": (sizes.tiny and not options.ablate) or options.deterministic,
                    "sglang": sizes.sglang,
                },
            },
        }
    )


if __name__ == "__main__":
    main()
