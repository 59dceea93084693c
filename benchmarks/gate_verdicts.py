"""What learning gates are judged by: each run's own earlier curve with the same seed, and bands that all seeds draw."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml
from train_run import PROJECT

GATES = PROJECT / "benchmarks" / "gates.yaml"
HISTORY = PROJECT / "benchmarks" / "results" / "gates.jsonl"
DEMO = "configs/demo/arithmetic.yaml"
MINIMUM_DRAWS = 3
MARGINS = {"accuracy": 0.04, "reward": 0.03, "gain": 0.03}
"""What has a band, and half its least width: what other rounding alone may do to 128 problems and to some thousand
samples. Seeds start from policies that solve more or less of the task; what they gain differs less."""
CURVE_MARGIN = 0.06
"""Most that the reward of an iteration, or the accuracy, may differ from that of the same seed on the same kind of
machine: a sampled token that other rounding changes is learned from. The reward of the first iteration, whose responses
the same weights wrote, may not differ at all."""
NO_BAND = "no band"


@dataclass(frozen=True)
class Gate:
    """A row of gates.yaml. `settings`: overrides of `config`, those that all gates have in common first.

    made_by: configuration and settings of the gate `start`, whose policy this one begins with.
    """

    name: str
    config: str
    settings: tuple[str, ...]
    command: str = "train"
    start: str = ""
    curve_of: str = ""
    made_by: tuple[str, ...] = ()

    def digest(self) -> str:
        """Of what decides its numbers: history of other settings does not count."""
        decides = [self.config, self.settings, self.start, *([self.made_by] if self.made_by else [])]
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Run:
    """What a gate's run did. rewards: mean reward of each iteration; of the gate `sft` the evaluated accuracy alone.
    machine: its processor and that one's generation, which decide how sums are rounded."""

    gate: str
    seed: int
    settings: str
    accuracy: float
    rewards: tuple[float, ...] = ()
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    commit: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""

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
        """Three standard deviations of a further run to either side of the mean, and at least `margin`.

        By chance a run lies outside one time in ten where three runs drew the band, in thirty where six did (Student's
        t distribution): runs of one more kind of machine make it a better one.
        """
        spread = 3 * stdev(values) * math.sqrt(1 + 1 / len(values))
        return cls(fmean(values) - max(spread, margin), fmean(values) + max(spread, margin))

    def verdict(self, value: float, what: str) -> str:
        """Empty inside the band. What solves a task has no band down to 0: whatever is broken would lie in it."""
        if not math.isfinite(value):
            return f"{what} is {value}"
        if self.low <= 0 and what != "gain":
            return f"{what} has a band down to 0 ({self}): start from a policy that solves some of the task"
        if value < self.low:
            return f"{what} {value:.3f} is too low (band {self})"
        return f"{what} {value:.3f} is too good (band {self})" if value > self.high else ""

    def __str__(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}"


def read_gates(file: Path = GATES) -> dict[str, Gate]:
    """Gates by name, in the order of the file."""
    tree: dict[str, Any] = yaml.safe_load(file.read_text())
    found = {}
    for name, row in tree["gates"].items():
        row = {"config": DEMO, "settings": [], **(row or {})}
        found[name] = Gate(name=name, **{**row, "settings": (*tree["common"], *row["settings"])})
    starts = {name: found[gate.start] for name, gate in found.items() if gate.start}
    made = {name: replace(found[name], made_by=(start.config, *start.settings)) for name, start in starts.items()}
    return found | made


def read_history(file: Path = HISTORY) -> list[Run]:
    """All runs that were kept, oldest first."""
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [Run(**{**row, "rewards": tuple(row["rewards"])}) for row in rows]


def verdicts_on(
    run: Run, gate: Gate, gates: dict[str, Gate], history: Sequence[Run], redrawn: bool = False
) -> list[str]:
    """What is wrong with a run, by the history of its gate, or of the gate whose curve it has to follow.

    redrawn: what is drawn was changed on purpose, so that a gate cannot follow its own curve: bands alone count.
    """
    reference = gates[gate.curve_of or gate.name]
    known = runs_of_reference(gate, gates, history)
    verdicts = []
    earlier = earlier_curve(run, gate, known)
    if earlier and not (redrawn and gate.curve_of == gate.name):
        verdicts.append(off_the_curve(run, earlier))
    known = draws(known)
    if len(known) < MINIMUM_DRAWS:
        add = f"{NO_BAND}: {len(known)} of {MINIMUM_DRAWS} draws of {reference.name} are known, add some by --record"
        return [verdict for verdict in [*verdicts, add] if verdict]
    verdicts += [band.verdict(getattr(run, what), what) for what, band in bands_of(known).items()]
    return [verdict for verdict in verdicts if verdict]


def runs_of_reference(gate: Gate, gates: dict[str, Gate], history: Iterable[Run]) -> list[Run]:
    """Those of the gate that this one is judged by, itself or the one whose curve it follows, with its settings."""
    reference = gates[gate.curve_of or gate.name]
    return [old for old in history if old.gate == reference.name and old.settings == reference.digest()]


def earlier_curve(run: Run, gate: Gate, known: Sequence[Run]) -> Run | None:
    """The latest run that this one has to equal: of its seed, on its kind of machine. known: of the reference."""
    same = [old for old in known if (old.seed, old.machine) == (run.seed, run.machine)]
    return same[-1] if gate.curve_of and same else None


def draws(known: Iterable[Run]) -> list[Run]:
    """The latest run of each seed on each kind of machine, so that repeats do not narrow a band; other rounding is
    another draw."""
    return list({(run.seed, run.machine): run for run in known}.values())


def bands_of(known: Sequence[Run]) -> dict[str, Band]:
    """By what they are of. known: runs of one gate."""
    found = [what for what in MARGINS if what == "accuracy" or known[0].rewards]
    return {what: Band.around([getattr(run, what) for run in known], MARGINS[what]) for what in found}


def off_the_curve(run: Run, earlier: Run) -> str:
    """Where a run leaves the curve of one with the same seed; empty where it does not."""
    for iteration, (value, expected) in enumerate(zip(run.rewards, earlier.rewards, strict=True), 1):
        if not abs(value - expected) <= (CURVE_MARGIN if iteration > 1 else 0.0):
            return f"reward {value:.3f} of iteration {iteration} is off the curve ({expected:.3f})"
    if not abs(run.accuracy - earlier.accuracy) <= CURVE_MARGIN:
        return f"accuracy {run.accuracy:.3f} is not that of its seed before ({earlier.accuracy:.3f})"
    return ""


def likeness(run: Run, gate: Gate, earlier: Run | None) -> str:
    """How a run compares with the one that it should equal or, as a layout, follow, for the reader."""
    if not gate.curve_of:
        return "ok"
    if earlier is None:
        return f"ok, no curve of {gate.curve_of} on such a machine"
    if gate.curve_of != gate.name:
        return "ok"
    pairs = list(zip((*run.rewards, run.accuracy), (*earlier.rewards, earlier.accuracy), strict=True))
    differ = [at for at, (value, expected) in enumerate(pairs, 1) if value != expected]
    if not differ:
        return "ok, as before"
    largest = max(abs(value - expected) for value, expected in pairs)
    return f"ok, as before up to iteration {differ[0] - 1}, then up to {largest:.3f} beside it"


def summary(gates: dict[str, Gate], history: Sequence[Run]) -> list[str]:
    """A line for each gate: the runs that are known with its settings, repeats too, how many draws they are, the bands
    that these have, and what is wrong with any run by all the others."""
    titles = "".join(f"{what:17}" for what in MARGINS)
    lines = [f"{'gate':14}{'runs':>5}{'draws':>6}  {titles}{'last':20}verdict"]
    for gate in gates.values():
        known = [run for run in history if run.gate == gate.name and run.settings == gate.digest()]
        drawn_by = draws(known)
        bands = bands_of(drawn_by) if len(drawn_by) >= MINIMUM_DRAWS else {}
        drawn = "".join(f"{bands.get(what, '')!s:17}" for what in MARGINS)
        last = f"{known[-1].date} {known[-1].commit}" if known else "never run"
        verdict = verdict_on_all(known, gate, gates, history)
        lines.append(f"{gate.name:14}{len(known):5}{len(drawn_by):6}  {drawn}{last:20}{verdict}".rstrip())
    return lines


def verdict_on_all(known: Sequence[Run], gate: Gate, gates: dict[str, Gate], history: Sequence[Run]) -> str:
    """Of the known runs of a gate, each by all the others; empty where too few others are known to tell."""
    found = []
    for run in known:
        verdicts = verdicts_on(run, gate, gates, [other for other in history if other is not run])
        if any(verdict.startswith(NO_BAND) for verdict in verdicts):
            return ""
        found += [f"seed {run.seed}: {verdict}" for verdict in verdicts]
    return "; ".join(found) or ("ok" if known else "")
