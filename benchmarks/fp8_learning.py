"""GRPO with rollouts in 8 bits beside rollouts in bfloat16, from the same start: held-out accuracy before and after,
and how far engine and actor are from each other, seed by seed.

Each seed makes a hybrid policy with experts, which `rlpipe sft` brings part of the way through the task of
configs/gpu/arithmetic.yaml; both runs go on from there, with truncated importance sampling. Seeds run beside each other
on one GPU, which a policy this small leaves idle most of the time.

    python benchmarks/fp8_learning.py [--seeds 0 1 2] [--iterations 12] [key=value ...]      overrides of all runs
"""

import argparse
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from lora_learning import UNTRACKED, Outcome, outcome_of
from train_run import train

CONFIG = "configs/gpu/arithmetic.yaml"
WAYS = {
    "bfloat16": [],
    "fp8": ["rollout.engine.quantization=fp8"],
    "fp8+cache": ["rollout.engine.quantization=fp8", "rollout.engine.kv_cache_dtype=fp8"],
}
POLICY = (
    "prepare.policy={architecture: qwen3_5_moe, layers: 8, hidden_size: 512, heads: 8, key_value_heads: 4, "
    "head_dim: 64, experts: 8, experts_per_token: 2, expert_intermediate_size: 256}"
)
SHARED = [
    "prepare.arithmetic.train_problems=16384",
    "rollout.prompts_per_iteration=64",
    "rollout.max_response_tokens=64",
    "rollout.engine.max_running_requests=256",
    "rollout.engine.memory_fraction=0.5",
    "algorithm.correction.weight=token",
    "algorithm.routing_replay=true",
    "actor.max_tokens_per_gpu=16384",
    "actor.threads=4",
    "actor.optimizer={learning_rate: 2.0e-4, warmup_steps: 4}",
    "checkpoint.interval_iterations=0",
]
"""memory_fraction: no more than `kv_cache_tokens` is taken of it, and the runs beside this one need theirs."""
_EXAMPLES = 256
"""In a step of supervised training."""


def main() -> None:
    options = _options()
    print(f"{CONFIG}: {options.iterations} iterations after {options.examples_steps} steps of examples", flush=True)
    print(f"{'seed':>4}  {'rollouts':<10}{'before':>8}{'after':>8}{'s/iteration':>13}{'mean gap':>10}", flush=True)
    outcomes: dict[str, list[Outcome]] = {}
    with ThreadPoolExecutor(len(options.seeds)) as beside:
        for found in beside.map(lambda seed: list(_outcomes(seed, options)), options.seeds):
            for way, outcome in found:
                outcomes.setdefault(way, []).append(outcome)
    for way, ones in outcomes.items():
        columns = zip(*((one.before, one.after, one.seconds, one.mean_gap) for one in ones), strict=True)
        print(_line("mean", way, Outcome(*map(fmean, columns))), flush=True)


def _outcomes(seed: int, options: argparse.Namespace) -> Iterator[tuple[str, Outcome]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = [f"seed={seed}", f"prepare.directory={folder}/task", *SHARED]
        _train_on_examples(folder, [*given, POLICY, f"model.path={folder}/policy", *options.overrides], options)
        start = [*given, *UNTRACKED, "prepare.policy=null", "warm_start=null", f"run.iterations={options.iterations}"]
        start += [f"model.path={folder}/examples/policy", f"eval.interval_iterations={options.iterations}"]
        for way in options.ways:
            outcome = outcome_of(train(CONFIG, folder, way, [*start, *WAYS[way], *options.overrides]))
            print(_line(str(seed), way, outcome), flush=True)
            yield way, outcome


def _train_on_examples(folder: Path, settings: list[str], options: argparse.Namespace) -> None:
    examples = ["warm_start=null", f"run.iterations={options.examples_steps}", "eval.interval_iterations=0"]
    examples += [f"sft.sequences_per_step={_EXAMPLES}", "sft.response_template='{solution}'"]
    rate = "actor.optimizer={learning_rate: 1.5e-3, warmup_steps: 20}"
    train(CONFIG, folder, "examples", [*settings, *examples, rate], command="sft")


def _line(seed: str, way: str, outcome: Outcome) -> str:
    shown = f"{outcome.before:>8.1%}{outcome.after:>8.1%}{outcome.seconds:>13.2f}{outcome.mean_gap:>10.1e}"
    return f"{seed:>4}  {way:<10}{shown}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--examples-steps", type=int, default=160, help="of supervised training")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["bfloat16", "fp8"])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of all runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
