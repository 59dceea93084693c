"""A policy made from the seed, warmed up, then improved by GRPO: held-out accuracy, time, and how far engine and actor
are from each other, iteration by iteration.

Where there is a GPU the run is configs/gpu/arithmetic.yaml (38 M parameters, bfloat16, CUDA graphs, engine and actor on
one GPU), otherwise the demo.

    python benchmarks/learning.py [key=value ...]      overrides, for instance seed=1
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

import torch
from train_run import train

COLUMNS = {
    "held out": ("eval/held_out/accuracy", "9.1%"),
    "reward": ("rollout/reward_mean", "8.3f"),
    "mean gap": ("mismatch/logprob_abs_mean", "11.2e"),
    "max gap": ("mismatch/logprob_abs_max", "11.2e"),
    "rollout tok/s": ("perf/rollout_tokens_per_second", "15,.0f"),
    "train TFLOP/s": ("perf/actor_train_tflops_per_gpu", "15.3f"),
    "seconds": ("time/step_seconds", "9.2f"),
}
"""Title -> metric and format. The gap is |SGLang - Megatron| of sampled tokens' log-probabilities, in nats."""


def main() -> None:
    config = "configs/gpu/arithmetic.yaml" if torch.cuda.is_available() else "configs/demo/arithmetic.yaml"
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        made = [f"prepare.directory={folder}/task", f"model.path={folder}/policy"]  # anew, for this run alone
        untracked = ["trackers.tensorboard=false", "trackers.wandb=off"]
        rows = train(config, Path(folder), "learning", [*untracked, *made, *sys.argv[1:]])
        seconds = time.monotonic() - begin
    print(f"{config} {' '.join(sys.argv[1:])}".strip())
    print("iteration" + "".join(f"{title:>{_width(form)}}" for title, (_, form) in COLUMNS.items()))
    for row in rows:
        print(line(row))
    trained = rows[1:]
    accuracy = [row["eval/held_out/accuracy"] for row in (rows[0], rows[-1])]
    gaps = [row["mismatch/logprob_abs_mean"] for row in trained]
    steps = [row["time/step_seconds"] for row in trained]
    print(f"held out {accuracy[0]:.1%} -> {accuracy[1]:.1%}; {len(trained)} iterations, median {median(steps):.2f} s")
    print(f"{seconds:.0f} s in all, with preparing, warm-up and starts; {sum(steps):.0f} s of iterations")
    print(f"mean gap {fmean(gaps):.2e}, of the worst iteration {max(gaps):.2e}")


def line(row: dict[str, float]) -> str:
    """One iteration; a metric that it does not have is left blank."""
    cells = (f"{row[metric]:{form}}" if metric in row else " " * _width(form) for metric, form in COLUMNS.values())
    return f"{row['iteration']:9}" + "".join(cells)


def _width(form: str) -> int:
    return int(form.split(",")[0].split(".")[0])


if __name__ == "__main__":
    main()
