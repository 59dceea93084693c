"""GRPO with adapters beside full training, from the same start: held-out accuracy before and after, seed by seed.

Each seed makes a policy, which `rlpipe sft` brings to a third of its task; both runs go on from there.

    python benchmarks/lora_learning.py                             the demo, seeds 0, 1, 2
    python benchmarks/lora_learning.py --demo hybrid --seeds 0     the demo of a hybrid with experts
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from train_run import train

UNTRACKED = ["trackers.tensorboard=false", "trackers.wandb=off", "checkpoint.save_hf=never"]


@dataclass(frozen=True)
class Demo:
    """example_steps: of supervised training before. Learning rates of both ways to go on, and settings of adapters."""

    config: str
    example_steps: int
    iterations: int
    full_learning_rate: float
    lora_learning_rate: float
    lora: tuple[str, ...]


DEMOS = {
    "arithmetic": Demo("configs/demo/arithmetic.yaml", 100, 8, 2e-4, 2e-3, ("rank=8", "alpha=16")),
    "hybrid": Demo("configs/demo/hybrid.yaml", 150, 14, 5e-4, 5e-3, ("rank=8", "alpha=16", "experts=each")),
}


@dataclass(frozen=True)
class Outcome:
    """Of one run: held-out accuracy, median seconds of an iteration, mean |SGLang - Megatron| in nats."""

    before: float
    after: float
    seconds: float
    mean_gap: float


def main() -> None:
    options = _options()
    demo = DEMOS[options.demo]
    print(f"{demo.config}: {demo.iterations} iterations after {demo.example_steps} steps of examples")
    print(f"{'seed':>4}  {'way':<5}{'before':>8}{'after':>8}{'s/iteration':>13}{'mean gap':>10}", flush=True)
    outcomes: dict[str, list[Outcome]] = {}
    for seed in options.seeds:
        for way, outcome in _outcomes(demo, seed, options.overrides):
            outcomes.setdefault(way, []).append(outcome)
            print(_line(str(seed), way, outcome), flush=True)
    for way, ones in outcomes.items():
        print(_line("mean", way, Outcome(*(fmean(column) for column in zip(*map(_fields, ones), strict=True)))))


def _outcomes(demo: Demo, seed: int, overrides: list[str]) -> Iterator[tuple[str, Outcome]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = [f"seed={seed}", f"prepare.directory={folder}/task"]
        _train_on_examples(demo, folder, [*made, f"model.path={folder}/policy", *overrides])
        start = [*made, *UNTRACKED, "warm_start=null", "prepare.policy=null", f"run.iterations={demo.iterations}"]
        start += [f"model.path={folder}/examples/policy", f"eval.interval_iterations={demo.iterations}", *overrides]
        adapters = [f"actor.lora.{setting}" for setting in demo.lora]
        for way, settings, rate in (
            ("full", [], demo.full_learning_rate),
            ("lora", adapters, demo.lora_learning_rate),
        ):
            rate_setting = f"actor.optimizer.learning_rate={rate}"
            yield way, outcome_of(train(demo.config, folder, way, [*start, *settings, rate_setting]))


def _train_on_examples(demo: Demo, folder: Path, settings: list[str]) -> None:
    examples = ["warm_start=null", f"run.iterations={demo.example_steps}", "sft.sequences_per_step=128"]
    examples += ["sft.response_template='{solution}'", "actor.optimizer={learning_rate: 3.0e-3, warmup_steps: 10}"]
    train(demo.config, folder, "examples", [*settings, *examples], command="sft")


def outcome_of(rows: list[dict[str, float]]) -> Outcome:
    trained = rows[1:]
    return Outcome(
        before=rows[0]["eval/held_out/accuracy"],
        after=rows[-1]["eval/held_out/accuracy"],
        seconds=median(row["time/step_seconds"] for row in trained),
        mean_gap=fmean(row["mismatch/logprob_abs_mean"] for row in trained),
    )


def _fields(outcome: Outcome) -> tuple[float, ...]:
    return outcome.before, outcome.after, outcome.seconds, outcome.mean_gap


def _line(seed: str, way: str, outcome: Outcome) -> str:
    shown = f"{outcome.before:>8.1%}{outcome.after:>8.1%}{outcome.seconds:>13.2f}{outcome.mean_gap:>10.1e}"
    return f"{seed:>4}  {way:<5}{shown}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--demo", choices=DEMOS, default="arithmetic")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of all runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
