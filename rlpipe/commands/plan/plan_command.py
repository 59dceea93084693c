"""`rlpipe plan CONFIG --cluster NAME`: as text or JSON, what does not fit, and the nearest setting that does."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlpipe.commands.clusters import load_cluster, settings_of
from rlpipe.config.load import load_config
from rlpipe.config.root import Config
from rlpipe.estimate.layouts import BetterLayout, better_layout
from rlpipe.estimate.memory import Model, path_or_bundled
from rlpipe.estimate.nearest import nearest_setting
from rlpipe.estimate.run_estimate import AT_LIMITS, MeanTokens, Plan, in_units, plan, planned_lengths
from rlpipe.estimate.seconds import Lengths, samples_of_a_prompt
from rlpipe.generation.engine_checks import check_engine_sizes
from rlpipe.model.description import ModelDescription
from rlpipe.model.draft_checks import check_drafts
from rlpipe.model.model_reader import PREDICTION_TENSOR, describe_model
from rlpipe.shared.errors import ConfigError, ModelError
from rlpipe.training.policy_checks import check_policy_sizes
from rlpipe.training.trained_share import planned_model


@dataclass(frozen=True)
class Answer:
    """The plan of a run on the cluster `cluster_name`.

    nearest: settings with which it would fit; None where it fits, or where no nearby setting does. faster: another
    layout where it fits and one is worth telling.
    """

    cluster_name: str
    planned: Plan
    lengths: Lengths
    nearest: tuple[str, ...] | None = None
    faster: BetterLayout | None = None

    @property
    def fits(self) -> bool:
        return not self.planned.problems

    def text(self) -> str:
        """For people."""
        lines = [
            _title(self.planned, self.cluster_name),
            *self.planned.notes,
            *_memory_lines(self.planned),
            *_second_lines(self.planned, self.lengths),
        ]
        if self.fits:
            return "\n".join([*lines, "", *_advice_lines(self.planned, self.faster), "It fits."])
        lines += ["", *(f"DOES NOT FIT  {problem}" for problem in self.planned.problems)]
        if self.nearest is None:
            lines.append("No nearby setting fits: use more nodes (nodes in the cluster's file) or a smaller model.")
        else:
            lines.append(f"Nearest setting that fits: {' '.join(self.nearest)}")
        return "\n".join(lines)

    def as_json(self) -> str:
        """For programs: bytes, seconds and counts as numbers."""
        planned, engine = self.planned, self.planned.memory.engine
        answer = {
            "run": planned.config.run.name,
            "cluster": self.cluster_name,
            "fits": self.fits,
            "problems": planned.problems,
            "nearest_setting": None if self.nearest is None else list(self.nearest),
            "notes": list(planned.notes),
            "gpus_needed": planned.config.needed_gpus,
            "gpus": planned.cluster.gpus,
            "idle_gpus": planned.idle_gpus,
            "parameters": planned.model.parameters,
            "trained_parameters": planned.model.trained,
            "memory": [
                {"name": need.name, "bytes": dict(need.parts), "total_bytes": need.total, "limit_bytes": need.have}
                for need in planned.needs
            ],
            "kept_state_bytes": planned.kept_state_bytes,
            "held_beside_engines_bytes": planned.held_beside_engines_bytes,
            "engine": {
                "kv_tokens": engine.kv_tokens,
                "recurrent_states": engine.states,
                "concurrent_requests": engine.concurrency,
            },
            "prompt_tokens": self.lengths.prompt_tokens,
            "response_tokens": self.lengths.response_tokens,
            "seconds": dict(planned.seconds),
            "step_seconds": planned.step_seconds,
            "checkpoint_bytes": planned.checkpoint_bytes,
            "checkpoint_seconds": planned.checkpoint_seconds,
            "warnings": list(planned.warnings),
            "faster_layout": None if self.faster is None else asdict(self.faster),
        }
        return json.dumps(answer, indent=2)


def run_plan(path: Path, overrides: Sequence[str], cluster_name: str, means: MeanTokens = AT_LIMITS) -> Answer:
    """Plan a run, with the settings that belong to the cluster under `overrides`. Raises ConfigError, ModelError."""
    cluster = load_cluster(cluster_name)
    overrides = [*settings_of(cluster), *overrides]
    config = load_config(path, overrides)
    _check_possible(config, means)
    # Where its configuration is silent about a prediction layer, the model may have one.
    model = describe_model(path_or_bundled(config.model.path), frozenset({PREDICTION_TENSOR}))
    _check_sizes(config, model)
    planned, lengths = plan(config, planned_model(config), cluster, means), planned_lengths(config, means)
    if planned.problems:
        nearest = _nearest(path, overrides, planned, model)
        if nearest is None and (fitting := better_layout(config, planned, means)):
            nearest = fitting.settings
        return Answer(cluster_name, planned, lengths, nearest=nearest)
    return Answer(cluster_name, planned, lengths, faster=better_layout(config, planned, means))


def _check_possible(config: Config, means: MeanTokens) -> None:
    limits = planned_lengths(config)
    if config.sft and means.prompt is not None:
        raise ConfigError("--prompt-tokens is for runs that generate; examples of sft have --response-tokens alone")
    if config.rollout.sampling.ignore_eos and means.response not in (None, limits.response_tokens):
        raise ConfigError(
            f"--response-tokens is {means.response}, but rollout.sampling.ignore_eos lets every response meet its "
            f"limit of {limits.response_tokens} tokens: leave it out"
        )
    given = (("prompt", means.prompt, limits.prompt_tokens), ("response", means.response, limits.response_tokens))
    for kind, mean, limit in given:
        if mean is not None and mean > limit:
            raise ConfigError(f"--{kind}-tokens is {mean}, but a {kind} has {limit} tokens at most: give a mean")


def _check_sizes(config: Config, model: ModelDescription) -> None:
    """Raise ModelError or ConfigError for what `rlpipe train` would refuse of `model`, as far as its configuration
    tells."""
    check_policy_sizes(config, model)
    if config.sft is None:
        check_engine_sizes(config, model)
        check_drafts(model, config.rollout.engine.draft, config.algorithm.routing_replay)


def _nearest(path: Path, overrides: Sequence[str], planned: Plan, model: ModelDescription) -> tuple[str, ...] | None:
    def fits(settings: Sequence[str]) -> bool:
        try:
            config = load_config(path, [*overrides, *settings])
            _check_sizes(config, model)
            return not plan(config, planned.model, planned.cluster).problems
        except (ConfigError, ModelError):
            return False

    settings = nearest_setting(planned.config, planned.cluster, fits)
    return None if settings is None else tuple(settings)


def _title(planned: Plan, cluster_name: str) -> str:
    cluster = planned.cluster
    hardware = f"{cluster.nodes} x {cluster.node.gpus} GPUs of {cluster.node.gpu_memory_gigabytes:g} GB"
    return (
        f"{planned.config.run.name} on {cluster_name} ({hardware if cluster.gpus else 'no GPU'}): "
        f"{planned.model.parameters / 1e9:,.3g} B parameters{_trained_share(planned.model)}"
    )


def _trained_share(model: Model) -> str:
    if model.adapters is None:
        return ""
    return f", {model.trained / 1e6:,.3g} M of adapters trained ({model.trained / model.parameters:.3%})"


def _memory_lines(planned: Plan) -> list[str]:
    lines = []
    for need in planned.needs:
        if not need.parts:
            continue
        limit = f" of {in_units(need.have)}" if need.have is not None else ""
        lines += ["", f"{need.name}: {in_units(need.total)}{limit}"]
        lines += [f"  {name:<28} {in_units(size):>10}" for name, size in need.parts.items()]
    if planned.kept_state_bytes:
        kept = in_units(planned.kept_state_bytes)
        lines += [
            "",
            f"where there is room, {kept} of optimizer states stay on each GPU of the actor, which is quicker",
        ]
    if planned.held_beside_engines_bytes:
        held = in_units(planned.held_beside_engines_bytes)
        lines += ["", f"where there is room, {held} of the actor's memory stay on each GPU while its engine generates"]
    if planned.config.sft:
        return lines
    engine = planned.memory.engine
    states = "" if engine.states is None else f", {engine.states:,} GDN state slots"
    longest = planned.config.longest_sequence_tokens
    together = f"{engine.concurrency:,} requests of {longest:,} tokens run at the same time"
    prompt = planned.config.data.max_prompt_tokens
    sharing = samples_of_a_prompt(planned.config, planned.model, planned.cluster, prompt)
    begin = min(engine.most_requests, engine.kv_tokens * sharing // prompt)
    if begin > engine.concurrency:
        together = f"{begin:,} requests begin together, {engine.concurrency:,} of {longest:,} tokens have room"
    return [*lines, "", f"each engine: KV pool of {engine.kv_tokens:,} tokens{states}; {together}"]


def _second_lines(planned: Plan, lengths: Lengths) -> list[str]:
    sequences = "examples" if planned.config.sft else f"prompts of {lengths.prompt_tokens:,} and responses"
    lines = ["", f"seconds of an iteration, with {sequences} of {lengths.response_tokens:,} tokens:"]
    if planned.step_seconds is None:
        return [*lines, f"  {'rollout':<28} {'-':>10}  no engine has room for a request"]
    lines += [f"  {phase:<28} {value:>10,.1f}" for phase, value in planned.seconds.items()]
    beside = "  generation and training side by side" if planned.config.rollout.iterations_ahead else ""
    size = in_units(planned.checkpoint_bytes)
    return [
        *lines,
        f"  {'step':<28} {planned.step_seconds:>10,.1f}{beside}",
        f"  {'a checkpoint':<28} {planned.checkpoint_seconds:>10,.1f}  {size}, written while the run goes on",
    ]


def _advice_lines(planned: Plan, faster: BetterLayout | None) -> list[str]:
    lines = [f"warning: {warning}" for warning in planned.warnings]
    if planned.idle_gpus:
        lines.append(
            f"{planned.idle_gpus} of {planned.cluster.gpus} GPUs idle: the run uses {planned.config.needed_gpus}."
        )
    if faster is not None and planned.step_seconds is not None:
        saved = 1 - faster.step_seconds / planned.step_seconds
        lines.append(
            f"Faster by these figures: {faster.step_seconds:,.1f} s an iteration ({saved:.0%} less) with "
            f"{' '.join(faster.settings)}"
        )
    return lines
