"""A hybrid policy learns together with its prediction layer, engines keep more and more of the drafts, and the policy
that comes out is measured with and without drafts at 1, 16 and 128 requests (benchmarks/rollout.py).

The run is configs/gpu/drafts.yaml: 40 layers with random weights, a supervised warm start, then GRPO with an engine
that drafts. Prompts of the measurement are those held out, temperature 1, responses end where the policy ends them.

    python benchmarks/draft_learning.py [--steps 3 5] [--rounds 2] [key=value ...]      overrides of the run
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from train_run import PROJECT, train

CONFIG = "configs/gpu/drafts.yaml"
COLUMNS = {
    "held out": ("eval/held_out/accuracy", "9.1%"),
    "reward": ("rollout/reward_mean", "8.3f"),
    "MTP loss": ("train/mtp_loss", "10.3f"),
    "tokens a pass": ("rollout/draft_pass_tokens", "15.2f"),
    "break-even": ("rollout/draft_break_even_tokens", "12.2f"),
    "1 kept": ("rollout/draft_kept_1_share", "8.1%"),
    "2 kept": ("rollout/draft_kept_2_share", "8.1%"),
    "3 kept": ("rollout/draft_kept_3_share", "8.1%"),
    "mean gap": ("mismatch/logprob_abs_mean", "10.1e"),
    "seconds": ("time/step_seconds", "9.2f"),
}
"""Title -> metric and format."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 5], help="of the drafts that are measured")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print_run(learn(folder, options.overrides))
        measure(folder, options)


def learn(folder: Path, overrides: list[str]) -> list[dict[str, float]]:
    """Metrics by iteration. The policy then lies in `folder`/drafts/policy, its task in `folder`/task."""
    places = [f"prepare.directory={folder}/task", f"model.path={folder}/start"]
    untracked = ["trackers.tensorboard=false", "trackers.wandb=off", "checkpoint.interval_iterations=0"]
    begin = time.monotonic()
    rows = train(CONFIG, folder, "drafts", [*places, *untracked, *overrides])
    print(f"{CONFIG} {' '.join(overrides)}".strip() + f": {time.monotonic() - begin:.0f} s in all")
    return rows


def print_run(rows: list[dict[str, float]]) -> None:
    print("iteration" + "".join(f"{title:>{_width(form)}}" for title, (_, form) in COLUMNS.items()))
    for row in rows:
        cells = (f"{row[name]:{form}}" if name in row else " " * _width(form) for name, form in COLUMNS.values())
        print(f"{row['iteration']:9}" + "".join(cells))
    sys.stdout.flush()


def measure(folder: Path, options: argparse.Namespace) -> None:
    """In a process of its own, since the run's memory on the GPU has to be free."""
    numbers = {"--steps": options.steps, "--concurrency": options.concurrency, "--rounds": [options.rounds]}
    given = [part for name, values in numbers.items() for part in (name, *map(str, values))]
    policy = ["--policy", str(folder / "drafts/policy"), "--rows", str(folder / "task/test.jsonl"), "--tokens", "192"]
    command = [sys.executable, "benchmarks/rollout.py", "--draft", "mtp", "auto", *policy, *given]
    subprocess.run(command, cwd=PROJECT, check=True)


def _width(form: str) -> int:
    return int(form.split(".")[0])


if __name__ == "__main__":
    main()
