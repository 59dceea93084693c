"""`rlpipe plan CONFIG --cluster NAME`: the plan as text, what does not fit, and the nearest setting that does."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlpipe.commands.launch.clusters import load_cluster, needed_gpus
from rlpipe.commands.plan.memory import Memory, Model, load_model, plan_memory
from rlpipe.commands.plan.nearest import nearest_setting
from rlpipe.commands.plan.seconds import Lengths, plan_seconds
from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.load import load_config
from rlpipe.config.root import Config
from rlpipe.shared.errors import ConfigError

_GPU_SHARE = 0.95  # what the allocator can use before fragmentation ends a run
_HOST_SHARE = 0.95


@dataclass(frozen=True)
class Need:
    """One thing that has a limit, in bytes or a count. `have` is None where the cluster file does not say."""

    name: str
    parts: Mapping[str, int]
    have: int | None

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.have is None or self.total <= self.have


@dataclass(frozen=True)
class Plan:
    """All needs of a run on a cluster, and the seconds of an iteration."""

    config: Config
    cluster: ClusterConfig
    model: Model
    memory: Memory
    needs: tuple[Need, ...]
    seconds: Mapping[str, float]

    @property
    def problems(self) -> list[str]:
        """One sentence for each thing that does not fit."""
        problems = [
            f"{need.name}: {_size(need.total)} needed, {_size(need.have or 0)} there"
            for need in self.needs
            if not need.fits
        ]
        if self.cluster.gpus and needed_gpus(self.config) > self.cluster.gpus:
            problems.append(f"GPUs: {needed_gpus(self.config)} needed, {self.cluster.gpus} there")
        if self.memory.engine.concurrency < 1:
            problems.append("engine: no room for a single request of the longest kind beside the weights")
        return problems


def plan(config: Config, model: Model, cluster: ClusterConfig, response_tokens: int | None = None) -> Plan:
    """Plan a run. `response_tokens`: assumed mean length of a response, the limit when None."""
    memory = plan_memory(config, model, cluster)
    lengths = Lengths(
        prompt_tokens=config.data.max_prompt_tokens,
        response_tokens=response_tokens or config.longest_training_response_tokens,
        samples=config.rollout.prompts_per_iteration * config.rollout.samples_per_prompt,
    )
    seconds = plan_seconds(config, model, cluster, memory, lengths)
    return Plan(config, cluster, model, memory, _needs(config, cluster, memory), seconds)


def run_plan(path: Path, overrides: Sequence[str], cluster_name: str, response_tokens: int | None = None) -> str:
    """What the command prints. Raises ConfigError, ModelError."""
    cluster = load_cluster(cluster_name)
    config = load_config(path, overrides)
    model = load_model(config.model.path)
    planned = plan(config, model, cluster, response_tokens)
    lines = [_title(planned, cluster_name), *_memory_lines(planned), *_second_lines(planned, response_tokens)]
    if not planned.problems:
        return "\n".join([*lines, "", "It fits."])
    lines += ["", *(f"DOES NOT FIT  {problem}" for problem in planned.problems)]
    return "\n".join([*lines, _advice(path, overrides, cluster, model)])


def _advice(path: Path, overrides: Sequence[str], cluster: ClusterConfig, model: Model) -> str:
    def fits(settings: Sequence[str]) -> bool:
        try:
            return not plan(load_config(path, [*overrides, *settings]), model, cluster).problems
        except ConfigError:
            return False

    settings = nearest_setting(load_config(path, overrides), cluster, fits)
    if settings is None:
        return "No nearby setting fits: use more nodes (nodes in the cluster's file) or a smaller model."
    return f"Nearest setting that fits: {' '.join(settings)}"


def _needs(config: Config, cluster: ClusterConfig, memory: Memory) -> tuple[Need, ...]:
    host = Need("host memory of a node", memory.host, int(cluster.node.memory_gigabytes * 1e9 * _HOST_SHARE))
    disk_bytes = None if cluster.node.disk_gigabytes is None else int(cluster.node.disk_gigabytes * 1e9)
    disk = Need("disk", memory.disk, disk_bytes)
    if not cluster.gpus:
        actor = Need("actor process", memory.actor, None)
        return (actor, Need("engine", memory.engine.parts, None), host, disk)
    have = int(cluster.node.gpu_memory_gigabytes * 1e9 * _GPU_SHARE)
    if not config.ray.colocate:
        return (Need("actor GPU", memory.actor, have), Need("engine GPU", memory.engine.parts, have), host, disk)
    if config.ray.shares_memory(gpus=True):
        return (*_turns(memory, have), host, disk)
    return (Need("GPU of actor and engine", _both(memory.actor, memory.engine.parts), have), host, disk)


def _turns(memory: Memory, have: int) -> Iterator[Need]:
    """What is on a shared GPU at the three times when most is there."""
    actor, engine = memory.actor, memory.engine.parts
    stays = {name: actor[name] for name in ("CUDA and NCCL", "weight sync")}
    graphs = {"graphs and workspace": engine["graphs and workspace"]}
    yield Need("GPU while the actor works", _both(actor, graphs), have)
    weights = {"parameters": actor["parameters"]}, {"parameters": engine["parameters"]}
    yield Need("GPU while weights pass", _both(weights[0] | stays, weights[1] | graphs), have)
    yield Need("GPU while the engine works", _both(stays, engine), have)


def _both(actor: Mapping[str, int], engine: Mapping[str, int]) -> dict[str, int]:
    return {f"actor {name}": size for name, size in actor.items()} | {
        f"engine {name}": size for name, size in engine.items()
    }


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
        limit = f" of {_size(need.have)}" if need.have is not None else ""
        lines += ["", f"{need.name}: {_size(need.total)}{limit}"]
        lines += [f"  {name:<28} {_size(size):>10}" for name, size in need.parts.items()]
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


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
