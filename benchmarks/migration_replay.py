"""What `rollout.migration` would save on GPUs, by a replay of drawn lengths at the pace that `rlpipe plan` has.

Engines of one GPU each run the shape of Qwen3.5-35B-A3B, or another model of configs/models. Lengths are drawn from a
lognormal distribution over prompts and around each, up to 32,768 tokens, eight responses to a prompt. What a run
measures of its engines, and moves responses by, is the line through the plan's seconds of a step with 1 to all of them.

    python benchmarks/migration_replay.py [--model Qwen3-8B] [--cluster local_8x141gb] [--engines 4x128 16x64]
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

# Before this folder, whose files hide packages.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from rlpipe.commands.clusters import load_cluster
from rlpipe.config.cluster import ClusterConfig
from rlpipe.estimate.decoding import EnginePass, pass_seconds
from rlpipe.estimate.memory import Model
from rlpipe.model.model_reader import describe_model
from rlpipe.monitoring.report.tail_replay import Setting, replay
from rlpipe.monitoring.response_record import GroupLengths, ResponseRecord, RolloutShape
from rollout.migration import Pace

_MOST_TOKENS = 32_768
_MEDIAN_TOKENS = 4_000
_SAMPLES = 8
_ITERATIONS = 4
_SEEDS = range(3)
_OVER_PROMPTS, _AROUND_PROMPT = 0.8, 0.4
"""Standard deviations of the logarithm."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="Qwen3.5-35B-A3B")
    parser.add_argument("--cluster", default="local_8x141gb")
    parser.add_argument("--engines", nargs="+", default=["2x64", "4x64", "8x64", "16x64"], help="engines x running")
    options = parser.parse_args()
    cluster, model = load_cluster(options.cluster), Model(describe_model(options.model).shape, False)
    print(f"{options.model}, {options.cluster}: seconds of generation for an iteration, means of {len(_SEEDS)} draws")
    print(
        f"{'engines x running':>18}{'responses':>11}{'1, 8, all: ms':>22}{'without':>10}{'migration':>11}{'saved':>8}"
    )
    for text in options.engines:
        engines, running = map(int, text.split("x"))
        seconds = planned_seconds(model, cluster, running)
        pace = measured_pace(seconds)
        shape = RolloutShape(engines, running, max(1, engines * running // _SAMPLES // 2), True, 1.0, False, 1)
        records = [drawn_records(shape, pace, seed) for seed in _SEEDS]
        plain, moving = (
            float(np.mean([replay(one, Setting(migration=migration), seconds.__getitem__).seconds for one in records]))
            for migration in (False, True)
        )
        line = ", ".join(f"{seconds[count] * 1e3:.1f}" for count in (1, 8, running))
        print(
            f"{text:>18}{shape.wanted * _SAMPLES:11}{line:>22}{plain:10.1f}{moving:11.1f}{1 - moving / plain:8.1%}",
            flush=True,
        )


def planned_seconds(model: Model, cluster: ClusterConfig, running: int) -> list[float]:
    """Of a step with none to `running` responses of median length."""
    return [pass_seconds(model, cluster, 1, EnginePass(count, _MEDIAN_TOKENS)) for count in range(running + 1)]


def measured_pace(seconds: Sequence[float]) -> Pace:
    """The line through these, but for the step with nothing to do."""
    slope, start = np.polyfit(np.arange(1, len(seconds)), seconds[1:], 1)
    return Pace(max(0.0, float(start)), max(0.0, float(slope)))


def drawn_records(shape: RolloutShape, pace: Pace, seed: int) -> list[ResponseRecord]:
    """The mean length of a prompt's responses is known, as after an epoch."""
    drawn = random.Random(seed)
    records = []
    for _ in range(_ITERATIONS):
        groups = [_group(drawn) for _ in range(shape.wanted)]
        records.append(ResponseRecord(shape, 1.0, pace, tuple(groups)))
    return records


def _group(drawn: random.Random) -> GroupLengths:
    median = _MEDIAN_TOKENS * drawn.lognormvariate(0, _OVER_PROMPTS)
    tokens = tuple(
        min(_MOST_TOKENS, max(1, round(median * drawn.lognormvariate(0, _AROUND_PROMPT)))) for _ in range(_SAMPLES)
    )
    return GroupLengths(tokens, max(1, sum(tokens) // len(tokens)))


if __name__ == "__main__":
    main()
