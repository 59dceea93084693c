"""Whole GRPO iterations of rlpipe beside those of TRL's GRPOTrainer, on one GPU, in one run.

Both get the shape of Qwen3-0.6B with random weights, the same prompts, group size, forced response length and Adam.
TRL runs offline in both ways that it has without vLLM: transformers' continuous batching, which decodes in CUDA graphs
over a paged cache, and `generate`. Its weights and moments are bfloat16, the fastest that it has; rlpipe's Adam keeps
float32. The first iterations of each are left out.

    python benchmarks/trl_step.py [--prompts 16] [--samples 8] [--tokens 512] [--iterations 3]
    python benchmarks/trl_step.py --tiny --prompts 2 --samples 4 --tokens 8     a CPU
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from layer_shapes import qwen3_config
from random_policy import save_random_policy
from train_run import PROJECT, train
from trl_run import TrlRun, trl_steps

_WARM_UP = 1
_LEARNING_RATE = 1e-6
_BETA2 = 0.98
_PROMPT_TOKENS = 64


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dtype = "float32" if options.tiny else "bfloat16"
        policy = save_random_policy(qwen3_config(options.tiny), folder / "policy", dtype)
        _write_prompts(options, folder / "rows.jsonl")
        print(
            f"{options.prompts} prompts x {options.samples} samples x {options.tokens} tokens, {dtype}; medians of "
            f"{options.iterations} iterations\n{'':24}{'s/iteration':>12}{'generation':>12}{'rest':>8}{'tokens/s':>10}"
            f"{'start':>8}",
            flush=True,
        )
        ours = _print_row("rlpipe", lambda: _rlpipe_steps(options, folder, policy, dtype))
        for name in options.paths:
            theirs = _print_row(f"TRL, {name}", lambda name=name: _trl_steps(options, folder, policy, name))
            print(f"{'rlpipe / TRL, ' + name:24}{theirs / ours:>11.2f}x", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--micro-batch", type=int, default=32, help="responses of one of TRL's passes")
    parser.add_argument("--paths", nargs="+", choices=("continuous", "generate"), default=["generate", "continuous"])
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    return parser.parse_args()


def _write_prompts(options: argparse.Namespace, path: Path) -> None:
    """As many as all iterations take, each of one length and different in its number."""
    count = options.prompts * (options.iterations + _WARM_UP)
    texts = [f"{index:06d} ".ljust(_PROMPT_TOKENS // 2, "x") for index in range(count)]
    path.write_text("".join(json.dumps({"prompt": text, "label": text.split()[0]}) + "\n" for text in texts))


def _print_row(name: str, run: Any) -> float:
    """Median seconds of an iteration."""
    begin = time.perf_counter()
    steps: list[dict[str, float]] = run()
    start = time.perf_counter() - begin - sum(step["seconds"] for step in steps[_WARM_UP:])
    kept = steps[_WARM_UP:]
    seconds, generation, tokens = (
        median(step[key] for step in kept) for key in ("seconds", "generation_seconds", "tokens")
    )
    parts = f"{seconds:>12.2f}{generation:>12.2f}{seconds - generation:>8.2f}"
    print(f"{name:24}{parts}{tokens / seconds:>10,.0f}{start:>8.0f}", flush=True)
    return seconds


def _rlpipe_steps(options: argparse.Namespace, folder: Path, policy: str, dtype: str) -> list[dict[str, float]]:
    settings = folder / "settings.yaml"
    settings.write_text(yaml.safe_dump(_rlpipe_settings(options, folder, policy, dtype)))
    rows = train(str(settings), folder / "runs", "ours", [])
    return [
        {
            "seconds": row["time/step_seconds"],
            "generation_seconds": row["time/rollout_seconds"],
            "tokens": row["rollout/response_tokens_mean"] * row["rollout/samples_count"],
        }
        for row in rows
        if row["iteration"]
    ]


def _rlpipe_settings(options: argparse.Namespace, folder: Path, policy: str, dtype: str) -> dict[str, Any]:
    return {
        "base": str(PROJECT / "configs/recipes/dapo_math.yaml"),
        "run": {"iterations": options.iterations + _WARM_UP},
        "model": {"path": policy},
        "data": {
            "train": [{"name": "prompts", "path": str(folder / "rows.jsonl"), "apply_chat_template": False}],
            "max_prompt_tokens": _PROMPT_TOKENS,
        },
        "eval": {"datasets": []},
        "rollout": {
            "prompts_per_iteration": options.prompts,
            "samples_per_prompt": options.samples,
            "max_response_tokens": options.tokens,
            "sampling": {"ignore_eos": True},
            "engines": 1,
            "engine": {
                "dtype": dtype,
                "tensor_parallel": 1,
                "max_running_requests": options.prompts * options.samples,
                "deterministic": False,
            },
        },
        "algorithm": {"kl": {"coefficient": 0.0}, "updates_per_iteration": 1, "old_policy": "rollout"},
        "actor": {
            "dtype": dtype,
            "processes": 1,
            "parallel": {"tensor": 1, "context": 1, "expert": 1},
            "max_tokens_per_gpu": "auto",
            "recompute": {"granularity": "auto"},
            "optimizer": {"learning_rate": _LEARNING_RATE, "beta2": _BETA2, "warmup_steps": 0},
        },
        "reward": {"workers": 2},
        "ray": {"colocate": True},
        "checkpoint": {"interval_iterations": 0},
        "trackers": {"tensorboard": False, "wandb": "off"},
    }


def _trl_steps(options: argparse.Namespace, folder: Path, policy: str, path: str) -> list[dict[str, float]]:
    return trl_steps(
        TrlRun(
            policy=policy,
            rows=str(folder / "rows.jsonl"),
            output=str(folder / f"trl-{path}"),
            prompts=options.prompts,
            samples=options.samples,
            tokens=options.tokens,
            steps=options.iterations + _WARM_UP,
            micro_batch=min(options.micro_batch, options.prompts * options.samples),
            learning_rate=_LEARNING_RATE,
            beta2=_BETA2,
            threads=0 if torch.cuda.is_available() else 1,
            forced=True,
            continuous=path == "continuous",
        )
    )


if __name__ == "__main__":
    main()
