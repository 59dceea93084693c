"""A learning gate's run: training or supervised training by `rlpipe`, in a process that may have its own cores."""

import json
import math
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gate_verdicts import DEMO, Gate, Run
from record import commit, processor_generation, versions
from train_run import PROJECT, train

LARGEST_GAP = 1e-3
"""Of |engine - actor| in mean nats a token; in float32 it is 1e-6, unless weights are stale or maths differs."""


@dataclass(frozen=True)
class Task:
    """A run to be made. folder: of its seed, where gates find each other's policies. defect: the name of the one
    planted in it, with `environment`, which plants it."""

    gate: Gate
    seed: int
    folder: Path
    defect: str = ""
    environment: Mapping[str, str] | None = None


def outcome_of(task: Task) -> Run | Exception:
    """In a worker's process."""
    try:
        return run_gate(task)
    except (ArithmeticError, subprocess.CalledProcessError) as error:
        return error


def run_gate(task: Task) -> Run:
    """Raises ArithmeticError for what no band excuses, and CalledProcessError where the run failed."""
    gate, folder = task.gate, task.folder
    name = f"{gate.name}-{task.defect.replace(' ', '-').replace(':', '')}" if task.defect else gate.name
    settings = settings_of(gate, task.seed, folder, name)
    rows = train(gate.config, folder, name, settings, gate.command, task.environment)
    if task.environment and not any(Path(json.loads(task.environment["RLPIPE_PLANTED"])["marks"]).iterdir()):
        raise LookupError(f"no process had the defect {task.defect!r}")
    check_rows(rows)
    if gate.command == "sft":
        return _finished(gate, task.seed, evaluate(settings, folder / name / "policy"), ())
    rewards = tuple(round(row["rollout/reward_mean"], 6) for row in rows[1:])
    return _finished(gate, task.seed, rows[-1]["eval/held_out/accuracy"], rewards)


def settings_of(gate: Gate, seed: int, folder: Path, name: str) -> list[str]:
    """All overrides of a gate's configuration. folder: of the seed. name: of the run, which prepares its own task."""
    settings = [f"seed={seed}", f"prepare.directory={folder}/{name}-task", *gate.settings]
    if not gate.start:
        return [*settings, f"model.path={folder}/{name}-start"]
    return [*settings, f"model.path={folder}/{gate.start}/policy", "prepare.policy=null", "warm_start=null"]


def _finished(gate: Gate, seed: int, accuracy: float, rewards: tuple[float, ...]) -> Run:
    return Run(
        gate.name,
        seed,
        gate.digest(),
        accuracy,
        rewards,
        commit=commit(),
        versions=versions(),
        machine=processor_generation(),
    )


def evaluate(settings: Iterable[str], policy: Path) -> float:
    """Greedy accuracy on the held-out problems of the policy that a supervised run wrote."""
    kept = [one for one in settings if one.split("=")[0] in ("seed", "prepare.directory")]
    command = [sys.executable, "-m", "rlpipe", "eval", DEMO, *kept, f"model.path={policy}", "prepare.policy=null"]
    done = subprocess.run(command, cwd=PROJECT, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, float] = json.loads(done.stdout[done.stdout.index("{") :])
    return answer["eval/held_out/accuracy"]


def check_rows(rows: Sequence[dict[str, float]]) -> None:
    """Raise ArithmeticError for what is wrong in whatever band."""
    for row in rows:
        for metric, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ArithmeticError(f"{metric} of iteration {row['iteration']} is {value}")
        if row.get("train/updates_skipped_count", 0):
            raise ArithmeticError(f"iteration {row['iteration']} skipped an update")
        gap = row.get("mismatch/logprob_abs_mean", 0.0)
        if gap > LARGEST_GAP and not row.get("rollout/off_policy_share", 0):
            raise ArithmeticError(f"iteration {row['iteration']}: engine and actor differ by {gap:.1e} nats")
