"""A game of many turns, learned from random weights: as an environment, and by an agent at the endpoint.

    python benchmarks/agent_learning.py [--seeds 0 1 2 3 4] [--iterations 30] [--folder runs/agent_learning]

Both are shown the same tokens, by `/v1/completions` at the endpoint, earn the same rewards for the same turns, and draw
the same random numbers, so that runs of one seed, which start from the same weights and tasks, are to be equal bit by
bit. Those that lie in the folder from before are read and not made again.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rlpipe.agents.agent_task import AgentTask
from rlpipe.environments import Action, Task
from rlpipe.environments.tasks.grid import Grid

CONFIG = """
base: {project}/configs/demo/grid.yaml
run: {{iterations: {iterations}}}
prepare: {{tasks: null}}
data: {{train: [{{name: grid, path: {folder}/train.jsonl, apply_chat_template: false}}]}}
eval:
  datasets: [{{name: held_out, path: {folder}/test.jsonl, apply_chat_template: false}}]
  interval_iterations: 5
"""
ENDPOINT = """
rollout:
  generate:
    function: agent
    environment: null
    agent: {run: "benchmarks.agent_learning:plays"}
"""
WAYS = {"environment": "", "endpoint": ENDPOINT}
_MOST_TURNS = 10
_HELD_OUT_TASKS = 100
_HELD_OUT = "eval/held_out/accuracy"
_COMPARED = (
    *("rollout/reward_mean", "rollout/response_tokens_mean", "rollout/accuracy", "advantage/abs_mean"),
    *("train/loss", "train/gradient_norm", "train/entropy", _HELD_OUT),
)


async def plays(task: AgentTask) -> dict[str, Any]:
    """The agent: a loop as people write it, around OpenAI's client."""
    game, rewards, text = Grid(), {}, str(task.prompt)
    await game.reset(Task(task.episode_id, text, task.label, task.metadata, task.seed))
    async with task.client() as client:
        for _ in range(_MOST_TURNS):
            answer = await client.completions.create(model=task.model, prompt=text, max_tokens=1)
            move = answer.choices[0].text
            step = await game.step(Action(move, ()), None)
            rewards[answer.id] = step.reward
            if step.observation is None:
                break
            text += move + step.observation.messages[0].content
    result = await game.result()
    return {"reward": result.reward, "correct": result.success, "turn_rewards": rewards}


@dataclass(frozen=True)
class Run:
    """Held-out success by iteration, turns of an episode in the last one, the seconds of all iterations, and what is to
    be the same for both ways, by iteration from the first."""

    way: str
    seed: int
    held_out: dict[int, float]
    turns: float
    seconds: float
    curve: list[list[float | None]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("runs/agent_learning"))
    arguments = parser.parse_args()
    runs = [
        learned(arguments.folder.resolve(), way, seed, arguments.iterations) for seed in arguments.seeds for way in WAYS
    ]
    print(f"{'way':<12}{'seed':>5}{'before':>8}{'after':>8}{'turns of an episode at the end':>32}{'minutes':>9}")
    for run in runs:
        before, after = run.held_out[0], run.held_out[max(run.held_out)]
        print(f"{run.way:<12}{run.seed:>5}{before:>8.1%}{after:>8.1%}{run.turns:>32.1f}{run.seconds / 60:>9.1f}")
    compare(runs)


def learned(folder: Path, way: str, seed: int, iterations: int) -> Run:
    """A whole `rlpipe train` in a process of its own, unless its folder is there from before."""
    from train_run import PROJECT, train

    name = f"{way}-seed{seed}-{iterations}"
    metrics = folder / name / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if not rows or rows[-1]["iteration"] < iterations:
        made = folder / f"made-{name}"
        made.mkdir(parents=True, exist_ok=True)
        config = CONFIG.format(project=PROJECT, folder=made, iterations=iterations) + WAYS[way]
        (made / "config.yaml").write_text(config)
        tasks = [json.dumps(row) + "\n" for row in Grid().tasks(600, seed)]
        (made / "test.jsonl").write_text("".join(tasks[:_HELD_OUT_TASKS]))
        (made / "train.jsonl").write_text("".join(tasks[_HELD_OUT_TASKS:]))
        settings = [f"model.path={made}/policy", f"seed={seed}", "trackers.tensorboard=false", "trackers.wandb=off"]
        rows = train(str(made / "config.yaml"), folder, name, settings)
    held_out = {int(row["iteration"]): row[_HELD_OUT] for row in rows if _HELD_OUT in row}
    seconds = sum(row["time/step_seconds"] for row in rows)
    curve = [[row.get(name) for name in _COMPARED] for row in rows if row["iteration"] > 0]
    return Run(way, seed, held_out, rows[-1]["episode/turns_mean"], seconds, curve)


def compare(runs: Sequence[Run]) -> None:
    """Means over seeds by iteration, and how long runs of one seed are equal."""
    print(f"\n{'held-out success':<18}{'environment':>20}{'endpoint':>20}")
    for iteration in runs[0].held_out:
        by_way = [[run.held_out[iteration] for run in runs if run.way == way] for way in WAYS]
        spread = [stdev(values) if len(values) > 1 else 0.0 for values in by_way]
        cells = "".join(f"{fmean(values):>13.1%} ±{one:>5.1%}" for values, one in zip(by_way, spread, strict=True))
        print(f"iteration {iteration:<8}{cells}")
    print("\nrewards, lengths, advantages, losses and gradient norms")
    for seed in sorted({run.seed for run in runs}):
        curves = [run.curve for run in runs if run.seed == seed]
        print(f"seed {seed}: the same bits in {equal_iterations(*curves)} of {len(curves[0])} iterations")


def equal_iterations(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many there are before the first that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True)))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
