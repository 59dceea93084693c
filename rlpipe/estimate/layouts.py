"""Another layout of the same run on the same GPUs that is faster by the estimate, or fits: where engines and actor are,
how wide engines are, how the actor is split."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from rlpipe.config.actor import ParallelConfig
from rlpipe.config.load import merge, validate
from rlpipe.config.root import Config
from rlpipe.estimate.run_estimate import AT_LIMITS, MeanTokens, Plan, plan
from rlpipe.model.actor_checks import check_engine_layout, check_layout
from rlpipe.model.description import ModelDescription
from rlpipe.shared.errors import ConfigError, ModelError

_WORTH_SHARE = 0.9  # of the present seconds, beyond which another layout is not worth a word
_NEAR_FASTEST = 1.02
_MOST_PLANS = 40  # of those that looked fastest by their parts
_WIDTHS = (1, 2, 4, 8)
_STAGES = (1, 2, 4)


@dataclass(frozen=True)
class BetterLayout:
    """Settings, and what an iteration takes with them."""

    settings: tuple[str, ...]
    step_seconds: float


@dataclass(frozen=True)
class _Part:
    """Half of a layout: settings by their key, and the seconds of the phases that depend on them alone."""

    processes: int
    changes: Mapping[str, Any]
    seconds: float


def better_layout(config: Config, planned: Plan, means: MeanTokens = AT_LIMITS) -> BetterLayout | None:
    """The layout with the fewest changes among those within 2 % of the fastest that fits; None where none saves a tenth
    of the iteration that is planned and fits, and where none fits.

    config: as it was given, with its settings that are `auto`.
    """
    model = planned.model.description
    if planned.cluster.gpus < 2 or model is None:
        return None
    wide = {processes for processes, _ in _placements(planned)}
    splits = [split for processes in sorted(wide) for split in _splits(planned, model, processes, means)]
    places = list(_engine_places(planned, model, means))
    pairs = [(place, split) for place, split in product(places, splits) if place.processes == split.processes]
    pairs.sort(key=lambda pair: (round(sum(part.seconds for part in pair), 1), _changed(config, pair)))
    fitting: list[BetterLayout] = []
    present = math.inf if planned.problems or planned.step_seconds is None else planned.step_seconds
    limit = present * _WORTH_SHARE
    for pair in pairs[:_MOST_PLANS]:
        fastest = min((one.step_seconds for one in fitting), default=limit)
        if sum(part.seconds for part in pair) > min(limit, fastest * _NEAR_FASTEST):
            break
        changes = _different(config, pair)
        seconds = _step_seconds(config, changes, planned, means)
        if seconds is not None and seconds <= limit:
            fitting.append(BetterLayout(_as_settings(changes), seconds))
    fastest = min((one.step_seconds for one in fitting), default=0.0)
    near = [one for one in fitting if one.step_seconds <= fastest * _NEAR_FASTEST]
    return min(near, key=lambda one: (len(one.settings), one.step_seconds), default=None)


def _placements(planned: Plan) -> Iterator[tuple[int, int | None]]:
    """Processes of the actor, and GPUs of the engines: None where they share the actor's."""
    gpus, config = planned.cluster.gpus, planned.config
    if config.sft:
        yield from ((count, None) for count in sorted({config.actor.processes, gpus}) if count <= gpus)
        return
    shared = {gpus} | ({config.actor.processes} if config.ray.colocate else set())
    yield from ((count, None) for count in sorted(shared) if count <= gpus)
    apart = {gpus // 4, gpus // 2, 3 * gpus // 4} | (set() if config.ray.colocate else {config.actor.processes})
    yield from ((count, gpus - count) for count in sorted(apart) if 0 < count < gpus)


def _engine_places(planned: Plan, model: ModelDescription, means: MeanTokens) -> Iterator[_Part]:
    """Engines of every width at every placement that have room for a request, with the seconds of a rollout."""
    for processes, apart in _placements(planned):
        alone: dict[str, Any] = {"actor.processes": processes}
        if planned.config.sft:
            yield _Part(processes, alone, 0.0)
            continue
        room = processes if apart is None else apart
        for width in (one for one in _WIDTHS if one <= planned.cluster.node.gpus and room % one == 0):
            if not _engine_divides(model, width):
                continue
            changes = alone | {
                "ray.colocate": apart is None,
                "rollout.engines": room // width,
                "rollout.engine.tensor_parallel": width,
            }
            tried = _unchecked(planned.config, {"actor.parallel": ParallelConfig(), **changes})
            seconds = plan(tried, planned.model, planned.cluster, means).seconds
            if "rollout" in seconds:
                yield _Part(processes, changes, seconds["rollout"])


def _splits(planned: Plan, model: ModelDescription, processes: int, means: MeanTokens) -> Iterator[_Part]:
    """Every way to split the policy over `processes` that divides it and leaves room on a GPU, with the seconds of its
    passes."""
    node, config = planned.cluster.node.gpus, planned.config
    widths = [size for size in _WIDTHS if size <= min(node, processes)]
    experts = [2**power for power in range(processes.bit_length())] if model.experts else [1]
    for tensor, context, pipeline, expert in product(widths, widths, _STAGES, experts):
        if tensor * context > node or processes % (tensor * context * pipeline) or processes % (expert * pipeline):
            continue
        parallel = ParallelConfig(
            tensor=tensor,
            sequence=tensor > 1,
            context=context,
            pipeline=pipeline,
            virtual_pipeline=config.actor.parallel.virtual_pipeline if pipeline > 1 else None,
            expert=expert,
        )
        if expert > node or not _actor_divides(model, parallel):
            continue
        changes: dict[str, Any] = {f"actor.parallel.{key}": value for key, value in parallel.model_dump().items()}
        longest, multiple = config.longest_pack_sequence_tokens, parallel.pack_multiple
        least = -(-(-(-longest // multiple) * multiple) // context)
        changes["actor.max_tokens_per_gpu"] = max(config.actor.pack_tokens, least)
        tried = _unchecked(config, {"actor.processes": processes, **changes})
        estimate = plan(tried, planned.model, planned.cluster, means)
        if sum(estimate.memory.actor.values()) <= estimate.gpu_bytes:
            passes = ("forward_backward", "ref_logprob", "old_logprob")
            yield _Part(processes, changes, sum(estimate.seconds.get(phase, 0.0) for phase in passes))


def _engine_divides(model: ModelDescription, tensor: int) -> bool:
    try:
        check_engine_layout(model, tensor)
    except ModelError:
        return False
    return True


def _actor_divides(model: ModelDescription, parallel: ParallelConfig) -> bool:
    try:
        check_layout(model, parallel)
    except ModelError:
        return False
    return True


def _step_seconds(config: Config, changes: Mapping[str, Any], planned: Plan, means: MeanTokens) -> float | None:
    """With the settings `changes`; None where they are refused or do not fit."""
    try:
        changed = validate(merge(config.model_dump(), _tree(changes)), "another layout")
    except ConfigError:
        return None
    estimate = plan(changed, planned.model, planned.cluster, means)
    return None if estimate.problems else estimate.step_seconds


def _unchecked(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy with other values, which nothing has validated."""
    for key, value in changes.items():
        config = _with_value(config, key.split("."), value)
    return config


def _with_value(section: Any, path: Sequence[str], value: Any) -> Any:
    first, *rest = path
    return section.model_copy(update={first: _with_value(getattr(section, first), rest, value) if rest else value})


def _changed(config: Config, parts: Sequence[_Part]) -> int:
    return len(_different(config, parts))


def _different(config: Config, parts: Sequence[_Part]) -> dict[str, Any]:
    """Of the settings of `parts`, those that `config` does not have; a budget that is chosen by memory stays so."""
    changes = {key: value for part in parts for key, value in part.changes.items()}
    changes["actor.processes"] = parts[0].processes
    if config.actor.max_tokens_per_gpu == "auto":
        del changes["actor.max_tokens_per_gpu"]
    return {key: value for key, value in changes.items() if _value(config, key) != value}


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _tree(changes: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in changes.items():
        *sections, name = key.split(".")
        leaf: dict[str, Any] = {name: value}
        for section in reversed(sections):
            leaf = {section: leaf}
        tree = merge(tree, leaf)
    return tree


def _as_settings(changes: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={json.dumps(value)}" for key, value in changes.items())
