"""One GRPO iteration of rlpipe beside one of TRL's GRPOTrainer, on a CPU, in one run.

Both get the same random policy, prompts, group size, token limit, temperature, reward and Adam settings, and the same
number of threads. The first iterations of each are left out.

    python benchmarks/cpu_step.py [--sizes 64x8x48 16x8x192 16x4x32] [--iterations 6] [--threads 1]

A size is prompts x samples of each x most tokens of a response.
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
_OF_TRL = ("seconds", "generation_seconds", "tokens")


@dataclass(frozen=True)
class Size:
    prompts: int
    samples: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> "Size":
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.prompts} x {self.samples} x {self.tokens}"


@dataclass(frozen=True)
class Measured:
    """Medians over the iterations kept. Tokens are sampled response tokens."""

    name: str
    seconds: float
    generation_seconds: float
    tokens: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def main() -> None:
    options = _options()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    print(f"prompts x samples x tokens, {options.threads} thread(s)")
    print(f"{'':24}{'s/iteration':>14}{'generation':>14}{'rest':>10}{'tokens/s':>12}{'tokens':>10}")
    for size in map(Size.parse, options.sizes):
        with tempfile.TemporaryDirectory() as folder:
            ours = _measure_rlpipe(options, size, Path(folder))
            theirs = _measure_trl(options, size, Path(folder))
        for one in (ours, theirs):
            rest = one.seconds - one.generation_seconds
            print(
                f"{size!s:16}{one.name:8}{one.seconds:14.2f}{one.generation_seconds:14.2f}{rest:10.2f}"
                f"{one.tokens_per_second:12,.0f}{one.tokens:10,.0f}"
            )
        ratio = ours.tokens_per_second / theirs.tokens_per_second
        print(f"{size!s:16}rlpipe / TRL: {ratio:.2f} x the tokens per second", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["64x8x48", "16x8x192", "16x4x32"])
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def _measure_rlpipe(options: argparse.Namespace, size: Size, folder: Path) -> Measured:
    overrides = [
        f"run.iterations={options.iterations + _WARM_UP}",
        f"model.path={folder}/policy",
        f"prepare.directory={folder}/task",
        "warm_start=null",
        "eval.datasets=[]",
        "checkpoint.interval_iterations=0",
        f"rollout.prompts_per_iteration={size.prompts}",
        f"rollout.samples_per_prompt={size.samples}",
        f"rollout.max_response_tokens={size.tokens}",
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
    seconds, generation = (median(row[f"time/{part}_seconds"] for row in kept) for part in ("step", "rollout"))
    return Measured("rlpipe", seconds, generation, median(tokens))


def _measure_trl(options: argparse.Namespace, size: Size, folder: Path) -> Measured:
    batch = size.prompts * size.samples
    run = TrlRun(
        policy=str(folder / "policy"),
        rows=str(folder / "task/train.jsonl"),
        output=str(folder / "trl"),
        prompts=size.prompts,
        samples=size.samples,
        tokens=size.tokens,
        steps=options.iterations + _WARM_UP,
        micro_batch=batch,
        learning_rate=_LEARNING_RATE,
        beta2=_BETA2,
        threads=options.threads,
    )
    steps = trl_steps(run)[_WARM_UP:]
    seconds, generation, tokens = (median(step[part] for step in steps) for part in _OF_TRL)
    return Measured("TRL", seconds, generation, tokens)


if __name__ == "__main__":
    main()
