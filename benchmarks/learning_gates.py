"""Short runs that have to learn as well as they did, and no better: one for each algorithm, mode and layout.

    python benchmarks/learning_gates.py                            every gate with seeds 0, 1 and 2
    python benchmarks/learning_gates.py gspo cp2 --seeds 1         some
    python benchmarks/learning_gates.py --record                   and keep what they did as history
    python benchmarks/learning_gates.py --record --missing         go on where that was cut off
    python benchmarks/learning_gates.py --summary                  run nothing, print what the history holds

A gate (benchmarks/gates.yaml) is red when a metric is not finite, an update is skipped, engine and actor disagree, or
its held-out accuracy, its reward or what the reward gained leaves the band that its history
(benchmarks/results/gates.jsonl) draws, either side: what is too good has usually seen the answers. A layout's gate has
to follow the curve of the gate that it names, seed by seed.
"""

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml
from record import commit, versions
from train_run import PROJECT, train

GATES = PROJECT / "benchmarks" / "gates.yaml"
HISTORY = PROJECT / "benchmarks" / "results" / "gates.jsonl"
DEMO = "configs/demo/arithmetic.yaml"
MINIMUM_RUNS = 3
MARGINS = {"accuracy": 0.04, "reward": 0.03, "gain": 0.03}
"""What has a band, and half its least width: what other rounding alone may do to 128 problems and to some thousand
samples. Seeds start from policies that solve more or less of the task; what they gain differs less."""
CURVE_MARGIN = 0.06
"""Most that a layout's reward of an iteration may differ from the reference's with the same seed; the first, whose
responses the same weights wrote, not at all."""
NO_BAND = "no band"
LARGEST_GAP = 1e-3
"""Of |engine - actor| in mean nats a token; in float32 it is 1e-6, unless weights are stale or maths differs."""


@dataclass(frozen=True)
class Gate:
    """A row of gates.yaml. `settings`: overrides of `config`, those that all gates have in common first."""

    name: str
    config: str
    settings: tuple[str, ...]
    command: str = "train"
    start: str = ""
    curve_of: str = ""

    def digest(self) -> str:
        """Of what decides its numbers: history of other settings does not count."""
        return hashlib.sha256(json.dumps([self.config, self.settings, self.start]).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Run:
    """What a gate's run did. rewards: mean reward of each iteration; of the gate `sft` the evaluated accuracy alone."""

    gate: str
    seed: int
    settings: str
    accuracy: float
    rewards: tuple[float, ...] = ()
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    commit: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        """Over the second half of the iterations."""
        return fmean(self.rewards[len(self.rewards) // 2 :])

    @property
    def gain(self) -> float:
        """Of the reward over that of the first iteration, whose responses are those of the policy that it began with.

        In mode `async` these are the responses that were finished first, which are shorter and right more often.
        """
        return self.reward - self.rewards[0]


@dataclass(frozen=True)
class Band:
    """Where a figure has to lie."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float], margin: float) -> "Band":
        """Three standard deviations of a further run to either side of the mean, and at least `margin`."""
        spread = 3 * stdev(values) * math.sqrt(1 + 1 / len(values))
        return cls(fmean(values) - max(spread, margin), fmean(values) + max(spread, margin))

    def verdict(self, value: float, what: str) -> str:
        """Empty inside the band. What solves a task has no band down to 0: whatever is broken would lie in it."""
        if self.low <= 0 and what != "gain":
            return f"{what} has a band down to 0 ({self}): start from a policy that solves some of the task"
        if value < self.low:
            return f"{what} {value:.3f} is too low (band {self})"
        return f"{what} {value:.3f} is too good (band {self})" if value > self.high else ""

    def __str__(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}"


def main() -> None:
    gates = read_gates()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gates", nargs="*", metavar="GATE", help=", ".join(gates))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--record", action="store_true", help="append what the runs did to the history")
    parser.add_argument("--summary", action="store_true", help="run nothing, print the bands of the history")
    parser.add_argument("--missing", action="store_true", help="only runs that the history does not have yet")
    options = parser.parse_args()
    if options.summary:
        print("\n".join(summary(gates, read_history())))
        return
    if unknown := sorted(set(options.gates) - set(gates)):
        sys.exit(f"unknown gates {', '.join(unknown)}: use {', '.join(gates)}")
    red = 0
    print(f"{'gate':14}{'seed':>5}{'accuracy':>10}{'reward':>8}  verdict")
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            for name in options.gates or gates:
                if options.missing and is_known(gates[name], seed):
                    continue
                verdicts = check(gates[name], gates, seed, Path(folder), options.record)
                red += any(verdicts)
    sys.exit(f"{red} of the runs are red" if red else 0)


def is_known(gate: Gate, seed: int) -> bool:
    """Whether the history has this gate with this seed and these settings."""
    return any((old.gate, old.seed, old.settings) == (gate.name, seed, gate.digest()) for old in read_history())


def check(gate: Gate, gates: dict[str, Gate], seed: int, folder: Path, record: bool) -> list[str]:
    """Run a gate, print its line, and say what is wrong with it."""
    try:
        run = run_gate(gate, gates, seed, folder)
    except ArithmeticError as error:
        print(f"{gate.name:14}{seed:5}{'':18}  {error}", flush=True)
        return [str(error)]
    verdicts = verdicts_on(run, gate, gates, read_history())
    if record:
        with HISTORY.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")
    reward = f"{run.reward:8.3f}" if run.rewards else " " * 8
    print(f"{run.gate:14}{seed:5}{run.accuracy:10.1%}{reward}  {'; '.join(verdicts) or 'ok'}", flush=True)
    return verdicts


def read_gates(file: Path = GATES) -> dict[str, Gate]:
    """Gates by name, in the order of the file."""
    tree: dict[str, Any] = yaml.safe_load(file.read_text())
    found = {}
    for name, row in tree["gates"].items():
        row = {"config": DEMO, "settings": [], **(row or {})}
        found[name] = Gate(name=name, **{**row, "settings": (*tree["common"], *row["settings"])})
    return found


def read_history(file: Path = HISTORY) -> list[Run]:
    """All runs that were kept, oldest first."""
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [Run(**{**row, "rewards": tuple(row["rewards"])}) for row in rows]


def run_gate(gate: Gate, gates: dict[str, Gate], seed: int, folder: Path) -> Run:
    """folder: where gates of one seed find each other's policies. Raises ArithmeticError for what no band excuses."""
    if gate.start and not (folder / gate.start / "policy").exists():
        run_gate(gates[gate.start], gates, seed, folder)
    settings = settings_of(gate, seed, folder)
    rows = train(gate.config, folder, gate.name, settings, gate.command)
    check_rows(rows)
    if gate.command == "sft":
        return _finished(gate, seed, evaluate(settings, folder / gate.name / "policy"), ())
    rewards = tuple(round(row["rollout/reward_mean"], 6) for row in rows[1:])
    return _finished(gate, seed, rows[-1]["eval/held_out/accuracy"], rewards)


def settings_of(gate: Gate, seed: int, folder: Path) -> list[str]:
    """All overrides of a gate's configuration; see `run_gate`."""
    settings = [f"seed={seed}", f"prepare.directory={folder}/{Path(gate.config).stem}-task", *gate.settings]
    if not gate.start:
        return [*settings, f"model.path={folder}/{gate.name}-start"]
    return [*settings, f"model.path={folder}/{gate.start}/policy", "prepare.policy=null", "warm_start=null"]


def _finished(gate: Gate, seed: int, accuracy: float, rewards: tuple[float, ...]) -> Run:
    return Run(gate.name, seed, gate.digest(), accuracy, rewards, commit=commit(), versions=versions())


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


def verdicts_on(run: Run, gate: Gate, gates: dict[str, Gate], history: Sequence[Run]) -> list[str]:
    """What is wrong with a run, by the history of its gate, or of the gate whose curve it has to follow."""
    reference = gates[gate.curve_of or gate.name]
    known = [old for old in history if old.gate == reference.name and old.settings == reference.digest()]
    if len(known) < MINIMUM_RUNS:
        return [f"{NO_BAND}: {len(known)} of {MINIMUM_RUNS} runs of {reference.name} are known, add some by --record"]
    verdicts = [band.verdict(getattr(run, what), what) for what, band in bands_of(known).items()]
    same = [old.rewards for old in known if old.seed == run.seed]
    if gate.curve_of and same:
        verdicts.append(off_the_curve(run.rewards, same[-1]))
    return [verdict for verdict in verdicts if verdict]


def bands_of(known: Sequence[Run]) -> dict[str, Band]:
    """By what they are of. known: runs of one gate."""
    found = [what for what in MARGINS if what == "accuracy" or known[0].rewards]
    return {what: Band.around([getattr(run, what) for run in known], MARGINS[what]) for what in found}


def summary(gates: dict[str, Gate], history: Sequence[Run]) -> list[str]:
    """A line for each gate: the runs that are known with its settings, the band that they draw, and what is wrong with
    any of them by all the others."""
    titles = "".join(f"{what:17}" for what in MARGINS)
    lines = [f"{'gate':14}{'runs':>5}  {titles}{'last':20}verdict"]
    for gate in gates.values():
        known = [run for run in history if run.gate == gate.name and run.settings == gate.digest()]
        bands = bands_of(known) if len(known) >= MINIMUM_RUNS else {}
        drawn = "".join(f"{bands.get(what, '')!s:17}" for what in MARGINS)
        last = f"{known[-1].date} {known[-1].commit}" if known else "never run"
        verdict = verdict_on_all(known, gate, gates, history)
        lines.append(f"{gate.name:14}{len(known):5}  {drawn}{last:20}{verdict}".rstrip())
    return lines


def verdict_on_all(known: Sequence[Run], gate: Gate, gates: dict[str, Gate], history: Sequence[Run]) -> str:
    """Of the known runs of a gate, each by all the others; empty where too few others are known to tell."""
    found = []
    for run in known:
        verdicts = verdicts_on(run, gate, gates, [other for other in history if other is not run])
        if verdicts and verdicts[0].startswith(NO_BAND):
            return ""
        found += [f"seed {run.seed}: {verdict}" for verdict in verdicts]
    return "; ".join(found) or ("ok" if known else "")


def off_the_curve(rewards: Sequence[float], reference: Sequence[float]) -> str:
    """Where a layout leaves the curve of the reference with the same seed; empty where it does not."""
    for iteration, (value, expected) in enumerate(zip(rewards, reference, strict=True), 1):
        if abs(value - expected) > (CURVE_MARGIN if iteration > 1 else 0.0):
            return f"reward {value:.3f} of iteration {iteration} is off the curve ({expected:.3f})"
    return ""


if __name__ == "__main__":
    main()
