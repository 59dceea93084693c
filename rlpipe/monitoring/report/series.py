"""How a metric is called, counted and coloured wherever a report shows it."""

import re
from collections.abc import Iterable
from functools import cache

from rlpipe.monitoring.metric_dictionary import METRICS
from rlpipe.monitoring.panels import GROUPS, name_pattern
from rlpipe.shared.phases import PHASES

# As `--c0`, `--c1`, ... in the page; the picture takes the light ones. Each pair reads on white and on near-black.
LIGHT = (
    "#3b6fb6",
    "#d9534f",
    "#2e8b57",
    "#c98a00",
    "#7b4fb5",
    "#0e8f9c",
    "#c2478f",
    "#7a8b1f",
    "#b5651d",
    "#5566cc",
    "#d08770",
    "#4f9d69",
    "#9a6fb0",
    "#8a8f98",
    "#a3874b",
    "#4a7c8c",
    "#b58a9e",
    "#6b6f3a",
)  # fmt: skip
DARK = (
    "#7aa7e8",
    "#f28b86",
    "#6cc795",
    "#f0bf4c",
    "#b294e6",
    "#57c8d3",
    "#ec8cc4",
    "#bccb5f",
    "#e5a067",
    "#99a6ff",
    "#e8b09f",
    "#95d6ac",
    "#c9a8dc",
    "#a9afb9",
    "#d6bd85",
    "#86b4c2",
    "#e0bccd",
    "#b3b777",
)  # fmt: skip
_OTHER = 13

_PHASE_SLOTS = {
    "rollout": 0,
    "reward": 5,
    "ref_logprob": 4,
    "old_logprob": 12,
    "forward": 2,
    "backward": 11,
    "optimizer": 7,
    "exchange": 8,
    "train_other": 10,
    "sleep_wake": 6,
    "weight_sync": 1,
    "eval": 3,
    "checkpoint": 9,
    "unaccounted": 13,
    "advantage": 14,
    "pack": 15,
    "tracking": 16,
    "data": 17,
}

_PHASE_NAMES = {
    "ref_logprob": "reference log-probs",
    "old_logprob": "old log-probs",
    "train_other": "rest of training call",
    "sleep_wake": "sleep and wake",
    "weight_sync": "weight sync",
    "eval": "evaluation",
}

_NAMES = {
    "rollout/tail_lost_share": "room lost",
    "time/step_seconds": "whole step",
    "time/unaccounted_seconds": "unaccounted",
    "time/unaccounted_share": "unaccounted",
    "perf/step_excluding_jit_seconds": "without compilation",
    "perf/actor_idle_share": "actor idle",
    "perf/rollout_idle_share": "engines idle",
    "perf/actor_train_tflops_per_gpu": "training",
    "perf/ref_logprob_tflops_per_gpu": "reference pass",
    "perf/actor_train_mfu": "MFU",
    "perf/actor_train_mfu_excluding_jit": "MFU without compilation",
    "perf/actor_train_hfu": "HFU",
    "perf/actor_train_seconds": "training call",
    "perf/jit_seconds": "compiling",
    "perf/jit_compiles": "compilations",
    "perf/jit_alarms": "alarms",
    "perf/jit_stalls": "stalls",
    "perf/rollout_tokens_per_second": "rollout tokens per second",
    "perf/actor_tokens_per_second": "actor tokens per second",
    "pack/fill_share": "fill of packs",
    "ranks/slowest": "slowest rank",
    "rollout/reward_mean": "mean reward",
    "rollout/reward_std": "standard deviation",
    "rollout/accuracy": "training prompts, sampled",
    "rollout/response_tokens_mean": "mean response",
    "rollout/response_tokens_max": "longest response",
    "rollout/truncated_share": "truncated",
    "rollout/weight_version_lag_max": "oldest token",
    "rollout/weight_version_lag_mean": "mean token",
    "rollout/equal_reward_groups_count": "groups of equal reward",
    "rollout/failed_count": "no response",
    "reward/timeouts_count": "grading timed out",
    "reward/errors_count": "grading failed",
    "reward/format_share": "format",
    "train/kl_loss": "KL to the reference",
    "train/clip_share": "clipped",
    "train/dual_clip_share": "dual-clipped",
    "train/updates_skipped_count": "skipped updates",
    "mismatch/logprob_abs_mean": "mean",
    "mismatch/logprob_abs_max": "largest",
    "fault/engine_restarts_count": "engines restarted",
    "fault/requests_reissued_count": "requests made again",
    "fault/healing_seconds": "healing",
}
_PATTERNS = (
    (r"eval/(.+)/accuracy", "held-out: {}"),
    (r"eval/(.+)/response_tokens_mean", "held-out: {}"),
    (r"eval/(.+)/reward_mean", "held-out: {}"),
    (r"eval/(.+)/loss", "held-out: {}"),
    (r"eval/(.+)/pass_at_(.+)", "{}: pass@{}"),
    (r"perf/rollout_engine_(.+)_tokens_per_second", "engine {}"),
    (r"ranks/\w+_(min|mean|max)_seconds", "{} over ranks"),
    (r"reward/(.+)_mean", "{}"),
)


def label(metric: str) -> str:
    """The series' name for a person."""
    phase = _phase(metric)
    if phase is not None:
        return phase_label(phase)
    if metric in _NAMES:
        return _NAMES[metric]
    for pattern, text in _PATTERNS:
        if found := re.fullmatch(pattern, metric):
            return text.format(*found.groups())
    return re.sub(r"_(seconds|share|count)$", "", metric.partition("/")[2] or metric).replace("_", " ")


def held_out(names: Iterable[str]) -> list[str]:
    """Of metrics' names the one of each evaluation set that says how well it is answered: its accuracy, its mean
    reward where the grader gives numbers alone, or its loss in a supervised run."""
    found: dict[str, str] = {}
    for name in names:
        if match := re.fullmatch(r"eval/(.+)/(accuracy|reward_mean|loss)", name):
            found[match[1]] = name if match[2] == "accuracy" else found.get(match[1], name)
    return list(found.values())


def phase_label(phase: str) -> str:
    return _PHASE_NAMES.get(phase, phase.replace("_", " "))


@cache
def unit(metric: str) -> str:
    """As the metric dictionary has it; "none" for a name that it does not know."""
    for name, declared in METRICS.items():
        if name == metric or ("{" in name and re.search(name_pattern(name), metric)):
            return declared.unit
    return "none"


def slot(metric: str) -> int:
    """Number of the series' colour, the same on every chart of every report."""
    phase = _phase(metric)
    if phase is not None:
        return _PHASE_SLOTS.get(phase, _OTHER)
    for pattern, number in _declared_slots():
        if found := pattern.search(metric):
            named = "".join(group for group in found.groups() if group)
            return (number + sum(map(ord, named))) % _OTHER if named else number
    return sum(map(ord, metric)) % _OTHER


def text(value: float, unit: str) -> str:
    """A value with its unit."""
    if unit == "share":
        return f"{value:.1%}"
    if unit == "bytes":
        return f"{value / 2**30:,.2f} GiB"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    suffix = {"seconds": " s", "tokens/second": " tok/s", "TFLOP/second": " TFLOP/s", "gigabytes/second": " GB/s"}
    return number + suffix.get(unit, "")


def _phase(metric: str) -> str | None:
    found = re.fullmatch(r"time/(\w+)_seconds", metric)
    return found[1] if found and found[1] in (*PHASES, "unaccounted") else None


@cache
def _declared_slots() -> list[tuple[re.Pattern[str], int]]:
    """By the place in the first panel that has the metric. What stands for braces is a group of the pattern."""
    slots: dict[str, int] = {}
    for panel in (panel for group in GROUPS for panel in group.panels):
        for number, metric in enumerate(panel.metrics):
            slots.setdefault(metric, number)
    return [(re.compile(name_pattern(metric).replace("[^/]+", "([^/]+)")), number) for metric, number in slots.items()]
