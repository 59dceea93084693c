"""`rlpipe plan CONFIG --cluster NAME`: the plan as text, what does not fit, and the nearest setting that does."""

from collections.abc import Sequence
from pathlib import Path

from rlpipe.commands.launch.clusters import load_cluster
from rlpipe.config.load import load_config
from rlpipe.estimate.memory import load_model
from rlpipe.estimate.nearest import nearest_setting
from rlpipe.estimate.run_estimate import Plan, in_units, plan
from rlpipe.shared.errors import ConfigError


def run_plan(path: Path, overrides: Sequence[str], cluster_name: str, response_tokens: int | None = None) -> str:
    """What the command prints. Raises ConfigError, ModelError."""
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
    lines = [
        _title(planned, cluster_name),
        *planned.notes,
        *_memory_lines(planned),
        *_second_lines(planned, response_tokens),
    ]
    if not planned.problems:
        return "\n".join([*lines, "", "It fits."])
    lines += ["", *(f"DOES NOT FIT  {problem}" for problem in planned.problems)]
    return "\n".join([*lines, _advice(path, overrides, planned)])


def _advice(path: Path, overrides: Sequence[str], planned: Plan) -> str:
    def fits(settings: Sequence[str]) -> bool:
        try:
            config = load_config(path, [*overrides, *settings])
            return not plan(config, planned.model, planned.cluster).problems
        except ConfigError:
            return False

    settings = nearest_setting(planned.config, planned.cluster, fits)
    if settings is None:
        return "No nearby setting fits: use more nodes (nodes in the cluster's file) or a smaller model."
    return f"Nearest setting that fits: {' '.join(settings)}"


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


def _second_lines(planned: Plan, response_tokens: int | None) -> list[str]:
    assumed = response_tokens or planned.config.longest_training_response_tokens
    lines = ["", f"seconds of an iteration, with responses of {assumed:,} tokens:"]
    lines += [f"  {phase:<28} {value:>10,.1f}" for phase, value in planned.seconds.items()]
    return [*lines, f"  {'step':<28} {sum(planned.seconds.values()):>10,.1f}"]
