"""What belongs on a dashboard. Every metric here is in the metric dictionary (a test checks it)."""

import re
from dataclasses import dataclass
from typing import Literal

from rlpipe.shared.phases import PHASES


@dataclass(frozen=True)
class Panel:
    """Curves over the iterations, beside each other or stacked. A part of a name in braces stands for any word."""

    title: str
    metrics: tuple[str, ...]
    kind: Literal["lines", "stacked"] = "lines"


@dataclass(frozen=True)
class Group:
    """Panels about one question. in_report: also in the run's report."""

    title: str
    panels: tuple[Panel, ...]
    in_report: bool = True


def name_pattern(metric: str) -> str:
    """A regular expression that matches the metric's whole name, whatever stands for its braces."""
    return "^" + re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(metric)) + "$"


def _rank_spread(part: str) -> tuple[str, ...]:
    return tuple(f"ranks/{part}_{reduce}_seconds" for reduce in ("min", "mean", "max"))


GROUPS = (
    Group(
        "Learning",
        (
            Panel("reward", ("rollout/reward_mean", "rollout/reward_std")),
            Panel("accuracy", ("rollout/accuracy", "eval/{dataset}/accuracy")),
            Panel("reward components", ("reward/{component}_mean", "reward/format_share")),
            Panel("pass@k", ("eval/{dataset}/pass_at_{k}",)),
            Panel("response tokens", ("rollout/response_tokens_mean", "rollout/response_tokens_max")),
            Panel("held-out accuracy", ("eval/{dataset}/accuracy",)),
            Panel("held-out reward", ("eval/{dataset}/reward_mean",)),
            Panel("held-out response tokens", ("eval/{dataset}/response_tokens_mean",)),
            Panel("truncated share", ("rollout/truncated_share",)),
            Panel("loss", ("train/loss", "train/policy_loss", "eval/{dataset}/loss")),
            Panel("KL", ("train/kl_loss",)),
            Panel("entropy", ("train/entropy",)),
            Panel("gradient norm", ("train/gradient_norm",)),
            Panel("importance ratio", ("train/ratio_mean",)),
            Panel("clipped share", ("train/clip_share", "train/dual_clip_share")),
        ),
    ),
    Group(
        "Episodes",
        (
            Panel("turns", ("episode/turns_mean", "episode/turns_max")),
            Panel("success", ("episode/success_share",)),
            Panel("seconds of an episode", ("episode/model_mean_seconds", "episode/tool_mean_seconds")),
            Panel("tool calls", ("episode/tool_calls_count", "episode/tool_failures_count")),
            Panel("tool failures by kind", ("episode/tool_failures_{kind}_count",)),
            Panel("what ended episodes", ("episode/ended_{reason}_count",)),
            Panel("state at the end", ("episode/state_{name}_mean",)),
            Panel("trained share", ("episode/trained_share",)),
            Panel("sequences of an episode", ("rollout/branches_mean", "rollout/branches_max")),
        ),
    ),
    Group(
        "Where the time goes",
        (
            Panel(
                "seconds of each phase", tuple(f"time/{phase}_seconds" for phase in (*PHASES, "unaccounted")), "stacked"
            ),
            Panel("step", ("time/step_seconds", "perf/step_excluding_jit_seconds")),
            Panel("share that no phase claims", ("time/unaccounted_share",)),
            Panel("idle shares", ("perf/actor_idle_share", "perf/rollout_idle_share")),
        ),
    ),
    Group(
        "Seconds of each part",
        (
            Panel("rollout seconds", ("time/rollout_seconds", "perf/rollout_seconds")),
            Panel("reference log-probability seconds", ("time/ref_logprob_seconds",)),
            Panel("old log-probability seconds", ("time/old_logprob_seconds",)),
            Panel("actor train seconds", ("perf/actor_train_seconds", "perf/train_seconds")),
            Panel("optimizer seconds", ("time/optimizer_seconds",)),
            Panel("weight sync seconds", ("time/weight_sync_seconds", "time/sleep_wake_seconds")),
            Panel("evaluation and checkpoint seconds", ("time/eval_seconds", "time/checkpoint_seconds")),
        ),
        in_report=False,  # which has them in its stack of phases
    ),
    Group(
        "Speed",
        (
            Panel("tokens per second and GPU, of the whole step", ("perf/tokens_per_gpu_per_second",)),
            Panel("rollout tokens per second", ("perf/rollout_tokens_per_second",)),
            Panel("rollout tokens per second and GPU", ("perf/rollout_tokens_per_gpu_per_second",)),
            Panel("tokens per second of each engine", ("perf/rollout_engine_{engine}_tokens_per_second",)),
            Panel("engines' room lost to the tail", ("rollout/tail_lost_share",)),
            Panel("actor tokens per second", ("perf/actor_tokens_per_second",)),
            Panel("actor tokens per second and GPU", ("perf/actor_tokens_per_gpu_per_second",)),
            Panel("actor TFLOP/s per GPU", ("perf/actor_train_tflops_per_gpu", "perf/ref_logprob_tflops_per_gpu")),
            Panel(
                "utilization",
                ("perf/actor_train_mfu", "perf/actor_train_mfu_excluding_jit", "perf/actor_train_hfu"),
            ),
            Panel("fill of packs", ("pack/fill_share",)),
            Panel("weight sync GB/s", ("weight_sync/gigabytes_per_second",)),
            Panel("optimizer that nothing hides", ("perf/optimizer_exposed_share",)),
        ),
    ),
    Group(
        "Ranks",
        (
            Panel("forward", _rank_spread("forward")),
            Panel("backward", _rank_spread("backward")),
            Panel("optimizer", _rank_spread("optimizer")),
            Panel("exchanges, waiting included", _rank_spread("exchange")),
            Panel("computing in all", _rank_spread("compute")),
            Panel("slowest rank", ("ranks/slowest",)),
        ),
    ),
    Group(
        "Memory",
        (
            Panel(
                "memory of a GPU",
                (
                    "memory/actor_gpu_peak_bytes",
                    "memory/actor_gpu_allocated_peak_bytes",
                    "memory/engine_gpu_peak_bytes",
                ),
            ),
            Panel(
                "host memory",
                ("memory/host_used_bytes", "memory/actor_host_peak_bytes", "memory/engine_host_peak_bytes"),
            ),
        ),
    ),
    Group(
        "Compilation",
        (
            Panel("seconds of compiling", ("perf/jit_seconds",)),
            Panel("compilations", ("perf/jit_compiles",)),
            Panel("alarms and stalls", ("perf/jit_alarms", "perf/jit_stalls")),
        ),
    ),
    Group(
        "Trust",
        (
            Panel("SGLang - Megatron log-probability", ("mismatch/logprob_abs_mean", "mismatch/logprob_abs_max")),
            Panel("correction of the mismatch", ("mismatch/weight_mean", "mismatch/masked_share")),
            Panel("skipped updates", ("train/updates_skipped_count",)),
            Panel("age of weights", ("rollout/weight_version_lag_max", "rollout/weight_version_lag_mean")),
            Panel("tokens of older weights", ("rollout/off_policy_share",)),
            Panel("groups of equal reward", ("rollout/equal_reward_groups_count",)),
            Panel("failed samples", ("rollout/failed_count", "reward/timeouts_count", "reward/errors_count")),
            Panel("lost engines", ("fault/engine_restarts_count", "fault/requests_reissued_count")),
            Panel("seconds of healing", ("fault/healing_seconds",)),
        ),
    ),
)
