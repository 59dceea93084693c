"""Two small iterations of every configuration in configs/demo: whether each goes through.

    python benchmarks/demo_runs.py [NAME ...]       for instance grid signals

`gsm8k` reads rows that are not made here (data/gsm8k), so it is run where it is named.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from train_run import PROJECT, train

from rlpipe.config.load import load_config

NEEDS_DATA = ("gsm8k",)
SMALL = [
    "trackers.tensorboard=false",
    "run.iterations=2",
    "eval.interval_iterations=2",
    "checkpoint.interval_iterations=0",
    "rollout.prompts_per_iteration=8",
    "rollout.samples_per_prompt=4",
]


def main() -> None:
    names = [path.stem for path in sorted((PROJECT / "configs" / "demo").glob("*.yaml"))]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    options = parser.parse_args()
    chosen = options.names or [name for name in names if name not in NEEDS_DATA]
    failed = 0
    print(f"{'demo':18}{'reward':>8}{'seconds':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted(chosen, key=lambda name: name != "sft"):  # whose policy others begin with
            begin = time.monotonic()
            try:
                rows = run(name, Path(folder))
            except subprocess.CalledProcessError as error:
                print(f"{name:18} failed with exit code {error.returncode}", flush=True)
                failed += 1
                continue
            reward = f"{rows[-1]['rollout/reward_mean']:8.3f}" if "rollout/reward_mean" in rows[-1] else " " * 8
            print(f"{name:18}{reward}{time.monotonic() - begin:9.0f}", flush=True)
    sys.exit(f"{failed} demos failed" if failed else 0)


def run(name: str, folder: Path) -> list[dict[str, float]]:
    """Metrics of the demo's iterations; its files lie in a folder of its own."""
    path = f"configs/demo/{name}.yaml"
    config = load_config(path)
    places = [f"prepare.directory={folder}/{name}-task"]
    if config.sft:
        return train(path, folder, name, [*SMALL[:3], *places, f"model.path={folder}/{name}-policy"], "sft")
    if config.warm_start is not None:
        places += ["warm_start.steps=10"]
    trained = folder / "sft" / "policy"
    begins_with_sft = config.prepare.policy is None and config.warm_start is None
    model = trained if begins_with_sft and trained.exists() else folder / f"{name}-policy"
    return train(path, folder, name, [*SMALL, *places, f"model.path={model}"])


if __name__ == "__main__":
    main()
