"""`rlpipe plan CONFIG --cluster NAME`: as text or JSON, what does not fit, and the nearest setting that does."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlpipe.commands.launch.clusters import load_cluster
from rlpipe.config.load import load_config
from rlpipe.estimate.memory import load_model
from rlpipe.estimate.nearest import nearest_setting
from rlpipe.estimate.run_estimate import Plan, in_units, plan
from rlpipe.shared.errors import ConfigError


@dataclass(frozen=True)
class Answer:
    """The plan of a run on the cluster `cluster_name`.

    nearest: settings with which it would fit; None where it fits, or where no nearby setting does.
    """

    cluster_name: str
    planned: Plan
    response_tokens: int
    nearest: tuple[str, ...] | None

    @property
    def fits(self) -> bool:
        return not self.planned.problems

    def text(self) -> str:
        """For people."""
        lines = [
            _title(self.planned, self.cluster_name),
            *self.planned.notes,
            *_memory_lines(self.planned),
            *_second_lines(self.planned, self.response_tokens),
        ]
        if self.fits:
            return "\n".join([*lines, "", "It fits."])
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
            "parameters": planned.model.parameters,
            "memory": [
                {"name": need.name, "bytes": dict(need.parts), "total_bytes": need.total, "limit_bytes": need.have}
                for need in planned.needs
            ],
            "engine": {
                "kv_tokens": engine.kv_tokens,
                "recurrent_states": engine.states,
                "concurrent_requests": engine.concurrency,
            },
            "response_tokens": self.response_tokens,
            "seconds": dict(planned.seconds),
            "step_seconds": sum(planned.seconds.values()),
        }
        return json.dumps(answer, indent=2)


def run_plan(path: Path, overrides: Sequence[str], cluster_name: str, response_tokens: int | None = None) -> Answer:
    """Plan a run. Raises ConfigError, ModelError."""
    cluster = load_cluster(cluster_name)
    config = load_config(path, overrides)
    limit = config.longest_training_response_tokens
    if config.rollout.sampling.ignore_eos and response_tokens not in (None, limit):
        raise ConfigError(
            f"--response-tokens is {response_tokens}, but rollout.sampling.ignore_eos lets every response meet its "
            f"limit of {limit} tokens: leave it out"
        )
    model = load_model(config.model.path)
    planned = plan(config, model, cluster, response_tokens)
    nearest = _nearest(path, overrides, planned) if planned.problems else None
    return Answer(cluster_name, planned, response_tokens or limit, nearest)


def _nearest(path: Path, overrides: Sequence[str], planned: Plan) -> tuple[str, ...] | None:
    def fits(settings: Sequence[str]) -> bool:
        try:
            config = load_config(path, [*overrides, *settings])
            return not plan(config, planned.model, planned.cluster).problems
        except ConfigError:
            return False

    settings = nearest_setting(planned.config, planned.cluster, fits)
    return None if settings is None else tuple(settings)


def _title(planned: Plan, cluster_name: str) -> str:
    cluster = planned.cluster
    hardware = f"{cluster.nodes} x {cluster.node.gpus} GPUs of {cluster.node.gpu_memory_gigabytes:g} GB"
    return (
        f"{planned.config.run.name} on {cluster_name} ({hardware if cluster.gpus else 'no GPU'}): "
        f"{planned.model.parameters / 1e9:,.3g} B parameters"
    )


def _memory_lines(planned: Plan) -> list[str]:
    lines = []
    for need in planned.needs:
        if not need.parts:
            continue
        limit = f" of {in_units(need.have)}" if need.have is not None else ""
        lines += ["", f"{need.name}: {in_units(need.total)}{limit}"]
        lines += [f"  {name:<28} {in_units(size):>10}" for name, size in need.parts.items()]
    engine = planned.memory.engine
    states = "" if engine.states is None else f", {engine.states:,} GDN state slots"
    longest = planned.config.longest_sequence_tokens
    lines += [
        "",
        f"each engine: KV pool of {engine.kv_tokens:,} tokens{states}; "
        f"{engine.concurrency:,} requests of {longest:,} tokens run at the same time",
    ]
    return lines


def _second_lines(planned: Plan, response_tokens: int) -> list[str]:
    lines = ["", f"seconds of an iteration, with responses of {response_tokens:,} tokens:"]
    lines += [f"  {phase:<28} {value:>10,.1f}" for phase, value in planned.seconds.items()]
    return [*lines, f"  {'step':<28} {sum(planned.seconds.values()):>10,.1f}"]
