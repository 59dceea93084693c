"""What differs between the configuration that a run was begun with and the one that it is to go on with."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpipe.shared.errors import ConfigError

FREE = (
    "run",
    "deadlines",
    "fault",
    "ray",
    "trackers",
    "trace",
    "checkpoint",
    "jit",
    "weight_sync",
    "actor.processes",
    "actor.parallel",
    "actor.comm_guard",
    "actor.recompute",
    "actor.max_tokens_per_gpu",
    "actor.pack_bucket_tokens",
    "actor.forward_max_tokens_per_gpu",
    "actor.logprob_chunk_tokens",
    "actor.gdn_backend",
    "actor.max_skipped_updates",
    "actor.peak_tflops",
    "actor.threads",
    "actor.optimizer.cpu_offload_fraction",
    "actor.optimizer.device_cache_gigabytes",
    "rollout.engines",
    "rollout.request_order",
    "rollout.migration",
    "rollout.engine.tensor_parallel",
    "rollout.engine.kv_cache_tokens",
    "rollout.engine.max_running_requests",
    "rollout.engine.memory_fraction",
    "rollout.generate.max_failed_share",
    "eval.interval_iterations",
    "eval.before_training",
    "reward.workers",
    "reward.remote_connections",
    "reward.memory_bytes",
    "reward.max_failed_share",
)
"""Where and how long a run computes, and what is kept of it; everything else is what it computes."""


@dataclass(frozen=True)
class Change:
    """One key with its two values. `free`: the experiment stays what it was."""

    key: str
    before: Any
    now: Any
    free: bool

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.before)} -> {_short(self.now)}"

    def allowed_by(self, keys: Sequence[str]) -> bool:
        """Whether one of `keys` is this key or a section around it."""
        return any(_is_within(self.key, key) for key in keys)


def config_changes(saved: Mapping[str, Any], given: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Change]:
    """All keys in which two resolved configurations differ.

    defaults: what a key counts as that one of them lacks, because another version of rlpipe wrote it.
    """
    stretched = _decay_follows_iterations(given)
    changes = []
    for key, before, now in _differences(saved, given, defaults):
        free = any(_is_within(key, section) for section in FREE) and not (key == "run.iterations" and stretched)
        changes.append(Change(key, before, now, free))
    return changes


def check_change_keys(keys: Sequence[str], *trees: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key of --allow-change that no configuration has."""
    leaves = {leaf for tree in trees for leaf, _ in _leaves(tree)}
    sections = {leaf.rsplit(".", count)[0] for leaf in leaves for count in range(1, leaf.count(".") + 1)}
    for key in keys:
        if key not in leaves | sections:
            near = difflib.get_close_matches(key, sorted(leaves | sections), 1)
            raise ConfigError(
                f"--allow-change {key[:100]!r}: there is no such key" + (f"; did you mean {near[0]!r}?" if near else "")
            )


def _differences(
    saved: Mapping[str, Any], given: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Dotted key and both values; a section that one side lacks as a whole is one value."""
    for name in dict.fromkeys((*given, *saved)):
        default = defaults.get(name)
        before, now = saved.get(name, default), given.get(name, default)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from _differences(before, now, default if isinstance(default, Mapping) else {}, f"{prefix}{name}.")
        elif before != now or isinstance(before, bool) is not isinstance(now, bool):
            yield f"{prefix}{name}", before, now


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; lists are values, because their elements have no names."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _decay_follows_iterations(tree: Mapping[str, Any]) -> bool:
    """Whether another number of iterations gives other learning rates."""
    optimizer = tree.get("actor", {}).get("optimizer", {})
    return optimizer.get("schedule", "constant") != "constant" and optimizer.get("decay_steps") is None


def _is_within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _short(value: Any) -> str:
    text = "unset" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
