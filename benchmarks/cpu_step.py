"""One GRPO iteration of rlpipe beside one of TRL's GRPOTrainer, on a CPU, in one run.

Both get the same random policy, prompts, group size, token limit, temperature, reward and Adam settings, and the same
number of threads. The first iterations of each are left out.

    python benchmarks/cpu_step.py [--prompts 64] [--samples 8] [--tokens 48] [--iterations 6] [--threads 1]
"""

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from train_run import train
from trl_run import TrlRun, trl_steps

_WARM_UP = 2
_LEARNING_RATE = 2e-4
_BETA2 = 0.98


@dataclass(frozen=True)
class Measured:
    """Medians over the iterations kept. Tokens are sampled response tokens."""

    name: str
    seconds: float
    tokens: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def main() -> None:
    options = _options()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        ours = _measure_rlpipe(options, Path(folder))
        theirs = _measure_trl(options, Path(folder))
    print(
        f"{options.prompts} prompts x {options.samples} samples x {options.tokens} tokens, {options.threads} thread(s)"
    )
    print(f"{'':10}{'s/iteration':>14}{'tokens/s':>14}{'tokens':>10}")
    for measured in (ours, theirs):
        print(f"{measured.name:10}{measured.seconds:14.2f}{measured.tokens_per_second:14,.0f}{measured.tokens:10,.0f}")
    print(f"rlpipe / TRL: {ours.tokens_per_second / theirs.tokens_per_second:.2f} x the tokens per second")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def _measure_rlpipe(options: argparse.Namespace, folder: Path) -> Measured:
    overrides = [
        f"run.iterations={options.iterations + _WARM_UP}",
        f"model.path={folder}/policy",
        f"prepare.directory={folder}/task",
        "warm_start=null",
        "eval.datasets=[]",
        "checkpoint.interval_iterations=0",
        f"rollout.prompts_per_iteration={options.prompts}",
        f"rollout.samples_per_prompt={options.samples}",
        f"rollout.max_response_tokens={options.tokens}",
        "algorithm.updates_per_iteration=1",
        "algorithm.old_policy=actor",
        f"actor.threads={options.threads}",
        f"actor.optimizer.learning_rate={_LEARNING_RATE}",
        f"actor.optimizer.beta2={_BETA2}",
        "actor.optimizer.warmup_steps=0",
    ]
    rows = train("configs/demo/arithmetic.yaml", folder / "runs", "ours", overrides)
    kept = [row for row in rows if row["iteration"] > _WARM_UP]
    tokens = [row["rollout/response_tokens_mean"] * row["rollout/samples_count"] for row in kept]
    return Measured("rlpipe", median(row["time/step_seconds"] for row in kept), median(tokens))


def _measure_trl(options: argparse.Namespace, folder: Path) -> Measured:
    batch = options.prompts * options.samples
    run = TrlRun(
        policy=str(folder / "policy"),
        rows=str(folder / "task/train.jsonl"),
        output=str(folder / "trl"),
        prompts=options.prompts,
        samples=options.samples,
        tokens=options.tokens,
        steps=options.iterations + _WARM_UP,
        micro_batch=batch,
        learning_rate=_LEARNING_RATE,
        beta2=_BETA2,
        threads=options.threads,
    )
    steps = trl_steps(run)[_WARM_UP:]
    return Measured("TRL", median(step["seconds"] for step in steps), median(step["tokens"] for step in steps))


if __name__ == "__main__":
    main()
