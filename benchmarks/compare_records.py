"""Whether a benchmark still does what the same kind of machine has recorded (`python benchmarks/record.py --check`).

Counts have to be equal, bytes within 2 %, ratios within 15 %. Seconds and rates are compared as multiples of the
calibration that ran in the same process (benchmarks/calibrated.py), within 15 %; only what got worse is out of limits.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlpipe.commands.cards.record_file import Record

Kind = Literal["count", "bytes", "ratio", "seconds", "rate"]

LIMITS: dict[Kind, float] = {"count": 0.0, "bytes": 0.02, "ratio": 0.15, "seconds": 0.15, "rate": 0.15}
"""Largest relative change of each kind."""


@dataclass(frozen=True)
class Figure:
    """A figure of a benchmark: each match of `pattern`, whose last group is the number; earlier ones name it."""

    label: str
    pattern: str
    kind: Kind

    def values(self, output: str) -> dict[str, float]:
        """By name, in the order of the output."""
        found: dict[str, float] = {}
        for match in re.finditer(self.pattern, output, re.MULTILINE):
            *names, number = match.groups()
            name = " ".join([self.label, *(" ".join(name.split()) for name in names)])
            times = sum(other.partition(" (")[0] == name for other in found)
            found[f"{name} ({times + 1})" if times else name] = float(number.replace(",", ""))
        return found


COMPARED = {
    "packing": (
        Figure("packs of", r"^  (rlpipe, \d+ x \d+) +(\d+)", "count"),
        Figure("advised", r"^  advisor: (actor.max_tokens_per_gpu) (\d+)", "count"),
    ),
    "monitoring_overhead": (
        Figure("exchanges", r'"exchanges": (\d+)', "count"),
        Figure("hooks", r'"exchange_hooks_seconds": ([0-9.]+)', "seconds"),
    ),
    "driver_scale": (
        Figure("bytes of a sample's metrics", r"^ *([\d,]+) samples .* ([\d.]+) bytes of metrics", "bytes"),
        Figure("driver", r"^ *([\d,]+) samples .* ([\d.]+) us a sample", "seconds"),
    ),
    "rollout": (Figure("pool over raw SGLang, %", r"^pool / raw +([\d.]+)%", "ratio"),),
    "weight_sync": (
        Figure("GB/s", r"^(rlpipe, \w+ GPUs?(?:, fp8)?) .* ([\d.]+) GB/s", "rate"),
        Figure("GB", r"^(rlpipe, \w+ GPUs?(?:, fp8)?) +([\d.]+) GB", "bytes"),
    ),
    "whole_step": (
        Figure("peak", r"^((?:GPU|host) peak.*? GB) .*?([\d.]+)$", "bytes"),
        Figure("tokens/s", r"^(rollout tokens/s) .*?([\d,]+)$", "ratio"),
    ),
}
"""What is compared of each benchmark. Seconds on a CPU are the processor's, like those of the calibration; on a GPU,
which is not shared, a ratio or a rate is compared as it is."""


@dataclass(frozen=True)
class Comparison:
    """One figure then and now. `change`: relative, after both were divided by their calibration where that is due."""

    name: str
    kind: Kind
    before: float
    now: float
    change: float | None

    @property
    def within(self) -> bool:
        if self.change is None:
            return False
        worse = {"seconds": self.change, "rate": -self.change, "ratio": -self.change}.get(self.kind, abs(self.change))
        return worse <= LIMITS[self.kind]

    def __str__(self) -> str:
        change = "cannot be compared" if self.change is None else f"{self.change:+.1%}"
        verdict = "ok" if self.within else f"out of its limit of {LIMITS[self.kind]:.0%}"
        return f"{self.name}: {self.before:g} -> {self.now:g}, {change}: {verdict}"


def compare(old: Record, new: Record) -> Iterator[Comparison]:
    """Every figure that the older record holds. One that is missing now cannot be compared: it is out of its limits."""
    for figure in COMPARED[old.name]:
        scale = _scale(figure.kind, old, new)
        present = figure.values(new.output)
        for name, before in figure.values(old.output).items():
            now = present.get(name, float("nan"))
            ratio = None if scale is None or name not in present else (now * scale / before if before else 1.0 + now)
            yield Comparison(f"{old.name}: {name}", figure.kind, before, now, None if ratio is None else ratio - 1)


def _scale(kind: Kind, old: Record, new: Record) -> float | None:
    """What a figure of now is multiplied with to be one of the machine as it was; None where that is not known."""
    if kind not in ("seconds", "rate"):
        return 1.0
    if not old.calibration_seconds or not new.calibration_seconds:
        return None
    slower = new.calibration_seconds / old.calibration_seconds
    return 1 / slower if kind == "seconds" else slower
