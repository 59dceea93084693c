"""The demo in the modes `sync`, `one_step_off` and `async`: accuracy, time and idle shares side by side.

    python benchmarks/modes.py [--seed 0] [overrides of configs/demo/arithmetic.yaml]

The modes run one after the other, so on a machine that is shared compare shares, not seconds.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import fmean

from train_run import train

MODES = ("sync", "one_step_off", "async")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {mode: run(mode, options.seed, Path(folder), options.overrides) for mode in MODES}
    print(f"{'mode':14}{'before':>9}{'after':>9}{'step s':>9}{'engines idle':>15}{'actor idle':>13}{'sum':>9}")
    for mode, iterations in rows.items():
        print(f"{mode:14}{summary(iterations)}")


def run(mode: str, seed: int, folder: Path, overrides: list[str]) -> list[dict[str, float]]:
    """Metrics of the iterations of one run; iteration 0 is the evaluation before training."""
    settings = [f"seed={seed}", f"rollout.mode={mode}", *overrides]
    if mode != "sync":
        settings.append("algorithm.old_policy=rollout")
    return train("configs/demo/arithmetic.yaml", folder, mode, settings)


def summary(iterations: list[dict[str, float]]) -> str:
    """One row. Idle shares are means over iterations after the first, which also starts everything."""
    later = iterations[2:]
    engines = fmean(row["perf/rollout_idle_share"] for row in later)
    actor = fmean(row["perf/actor_idle_share"] for row in later)
    accuracy = [row["eval/held_out/accuracy"] for row in (iterations[0], iterations[-1])]
    step = fmean(row["time/step_seconds"] for row in later)
    return f"{accuracy[0]:9.1%}{accuracy[1]:9.1%}{step:9.2f}{engines:15.1%}{actor:13.1%}{engines + actor:9.1%}"


if __name__ == "__main__":
    main()
