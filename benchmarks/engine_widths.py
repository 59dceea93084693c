"""How many GPUs an engine should span: the same requests through pools of narrow and of wide engines on the same GPUs,
one pool after the other, beside what `rlpipe plan` says of each.

    python benchmarks/engine_widths.py --layers 8 --widths 1,2,4      on all GPUs of this machine
    python benchmarks/engine_widths.py --model Qwen3.5-35B-A3B --tokens 1024
    python benchmarks/engine_widths.py --tiny --gpus 2 --widths 1,2 --requests 16 --tokens 16      a CPU
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "rollout"))

from layer_shapes import hybrid_config, text_model, tiny_model
from random_policy import save_random_policy
from rollout_ablation import through_pool
from rollout_requests import make_requests
from whole_step_setup import MODELS

from rlpipe.config.root import Config
from rlpipe.estimate.present_cluster import present_cluster
from rlpipe.estimate.run_estimate import plan
from rlpipe.training.placement import placements
from rlpipe.training.ray_cluster import ray_cluster
from rlpipe.training.trained_share import planned_model
from rollout.pool import RolloutPool

_PROMPT_TOKENS = 64
_SAMPLES = 8
_WARM_TOKENS = 16
_VOCABULARY = 32_768


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = save_random_policy(shape(options), Path(scratch) / "policy", options.dtype)
        print(f"{options.requests} requests of {options.tokens:,} tokens on {options.gpus} GPUs", flush=True)
        print(f"{'engines':>10}{'of GPUs':>10}{'tokens/s':>12}{'step ms':>10}{'planned ms':>12}{'start s':>10}")
        for width in options.widths:
            print(measured(width, folder, options), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="", help="a whole model of configs/models, with random weights")
    add("--layers", type=int, default=8, help="without --model, first layers of Qwen3.5-35B-A3B's shape")
    add("--tiny", action="store_true", help="small widths and float32, for a CPU")
    add("--gpus", type=int, default=0, help="0: all of this machine")
    add("--widths", default="1,2,4", help="GPUs of an engine, one pool each")
    add("--requests", type=int, default=128, help="of all engines together")
    add("--tokens", type=int, default=1024)
    add("--rounds", type=int, default=2)
    add("--folder", type=Path, default=None, help="where the policy is written for the time")
    options = parser.parse_args()
    options.here = present_cluster()
    options.gpus = options.gpus or max(1, options.here.gpus)
    options.widths = [int(width) for width in options.widths.split(",") if int(width) <= options.gpus]
    options.dtype = "float32" if options.tiny else "bfloat16"
    return options


def shape(options: argparse.Namespace) -> dict[str, Any]:
    if options.model:
        return text_model(json.loads((MODELS / options.model / "config.json").read_text()))
    whole = hybrid_config(options.layers, _VOCABULARY, tiny=False)
    return tiny_model(whole) if options.tiny else whole


def measured(width: int, folder: str, options: argparse.Namespace) -> str:
    """A line of the table. A first round of few tokens is left out: it compiles."""
    config = configuration(width, folder, options)
    planned = plan(config, planned_model(config), options.here).seconds["rollout"]
    requests = make_requests(options.requests, options.tokens)
    begin = time.perf_counter()
    with ray_cluster(config), placements(config) as (_, place), RolloutPool.start(config, folder, place) as pool:
        pool.wait_until_ready()
        start_seconds = time.perf_counter() - begin
        through_pool(pool, make_requests(options.requests, _WARM_TOKENS))
        seconds = []
        for _ in range(options.rounds):
            begin = time.perf_counter()
            tokens = through_pool(pool, requests)
            seconds.append(time.perf_counter() - begin)
    step, expected = median(seconds) / options.tokens, planned / options.tokens
    return (
        f"{options.gpus // width:>10}{width:>10}{tokens / median(seconds):>12,.0f}{step * 1e3:>10.2f}"
        f"{expected * 1e3:>12.2f}{start_seconds:>10.1f}"
    )


def configuration(width: int, folder: str, options: argparse.Namespace) -> Config:
    engines = options.gpus // width
    return Config.model_validate(
        {
            "run": {"name": "engine-widths", "iterations": 1},
            "model": {"path": folder},
            "data": {"train": [{"name": "none", "path": "unused"}], "max_prompt_tokens": _PROMPT_TOKENS},
            "actor": {"processes": options.gpus, "max_tokens_per_gpu": _PROMPT_TOKENS + options.tokens},
            "ray": {"colocate": True, "sleep": "never"},
            "rollout": {
                "prompts_per_iteration": max(1, options.requests // _SAMPLES),
                "samples_per_prompt": min(_SAMPLES, options.requests),
                "max_response_tokens": options.tokens,
                "engines": engines,
                "engine": {
                    "dtype": options.dtype,
                    "tensor_parallel": width,
                    "max_running_requests": -(-options.requests // engines),
                    "memory_fraction": 0.3 if options.tiny else 0.8,
                    "deterministic": False,
                },
            },
        }
    )


if __name__ == "__main__":
    main()
