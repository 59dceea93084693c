"""Every configuration in configs/demo: two small iterations of each, to see whether it goes through, or all of it as it
stands, to see what comes of it.

    python benchmarks/demo_runs.py [NAME ...]       for instance grid signals
    python benchmarks/demo_runs.py --whole          an hour or so on two cores

`gsm8k` reads rows that are not made here (data/gsm8k), so it is run where it is named.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from train_run import PROJECT, train

from rlpipe.config.load import load_config

NEEDS_DATA = ("gsm8k",)
SMALL = [
    "run.iterations=2",
    "eval.interval_iterations=2",
    "checkpoint.interval_iterations=0",
    "rollout.prompts_per_iteration=8",
    "rollout.samples_per_prompt=4",
]
_GAP = "mismatch/logprob_abs_mean"


def main() -> None:
    names = [path.stem for path in sorted((PROJECT / "configs" / "demo").glob("*.yaml"))]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--whole", action="store_true", help="as they stand")
    options = parser.parse_args()
    chosen = options.names or [name for name in names if name not in NEEDS_DATA]
    failed = 0
    print(
        f"{'demo':18}{'iterations':>11}{'reward':>8}{'to':>8}{'held out':>10}{'to':>8}{'mean gap':>10}{'seconds':>9}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted(chosen, key=lambda name: name != "sft"):  # whose policy others begin with
            begin = time.monotonic()
            try:
                rows = run(name, Path(folder), options.whole)
            except subprocess.CalledProcessError as error:
                print(f"{name:18} failed with exit code {error.returncode}", flush=True)
                failed += 1
                continue
            print(f"{name:18}{line(rows)}{time.monotonic() - begin:9.0f}", flush=True)
    sys.exit(f"{failed} demos failed" if failed else 0)


def run(name: str, folder: Path, whole: bool) -> list[dict[str, float]]:
    """Metrics of the demo's iterations; its files lie in a folder of its own."""
    path = f"configs/demo/{name}.yaml"
    config = load_config(path)
    settings = [] if whole else list(SMALL)
    if config.warm_start is not None and not whole:
        settings += ["warm_start.steps=10"]
    settings += [f"prepare.directory={folder}/{name}-task", "trackers.tensorboard=false"]
    trained = folder / "sft" / "policy"
    begins_with_sft = config.prepare.policy is None and config.warm_start is None
    model = trained if begins_with_sft and trained.exists() else folder / f"{name}-policy"
    return train(path, folder, name, [*settings, f"model.path={model}"], "sft" if config.sft else "train")


def line(rows: Sequence[Mapping[str, float]]) -> str:
    """Cells of a run, blank where it has no such metric. Before the first iteration there is an evaluation at most."""
    trained = [row for row in rows if row["iteration"] > 0]
    held_out = next((name for row in rows for name in row if re.fullmatch("eval/.*/accuracy", name)), "")
    gaps = [row[_GAP] for row in trained if _GAP in row]
    cells = [
        f"{len(trained):11}",
        *_first_and_last(trained, "rollout/reward_mean", ("8.3f", "8.3f")),
        *_first_and_last(rows, held_out, ("10.1%", "8.1%")),
        f"{max(gaps):10.1e}" if gaps else " " * 10,
    ]
    return "".join(cells)


def _first_and_last(rows: Sequence[Mapping[str, float]], metric: str, forms: tuple[str, str]) -> Iterator[str]:
    found = [row[metric] for row in rows if metric in row]
    for value, form in zip((found[0], found[-1]) if found else (None, None), forms, strict=True):
        yield " " * int(form.split(".")[0]) if value is None else f"{value:{form}}"


if __name__ == "__main__":
    main()
