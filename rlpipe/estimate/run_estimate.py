"""Whether a run fits a cluster: all that has a limit, and the seconds of an iteration."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.root import Config
from rlpipe.estimate.automatic import candidates, choice_note, engine_candidates, is_automatic, with_engine_share_of
from rlpipe.estimate.memory import (
    STAYING_PARTS,
    Memory,
    Model,
    checkpoint_bytes,
    held_beside_engines_bytes,
    kept_state_bytes,
    plan_memory,
)
from rlpipe.estimate.seconds import Lengths, plan_seconds

_GPU_SHARE = 0.95  # what the allocator can use before fragmentation ends a run
_HOST_SHARE = 0.95
_ROOMY_SHARE = 0.9  # of these limits, up to which `auto` goes: bytes are planned within 10 %
_NEAR_FASTEST = 1.02
_GRACE_MARGIN = 1.5  # disks that others use, too, are slower at times
_UPDATE_PHASES = ("forward_backward", "optimizer", "weight_sync")  # after which a run that is to end saves
_AGAIN = 1.1  # what computing layers again has to save: that it costs is sure, and what larger packs save is fitted


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
    """All needs of a run on a cluster, and the seconds of an iteration by phase.

    config: with what was chosen for its settings that were `auto`; `notes` say so.
    """

    config: Config
    cluster: ClusterConfig
    model: Model
    memory: Memory
    needs: tuple[Need, ...]
    seconds: Mapping[str, float]
    notes: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float | None:
        """Of a whole iteration; where generation runs beside training, of the longer of the two. None where no engine
        has room for a request."""
        if self.config.sft is None and "rollout" not in self.seconds:
            return None
        rollout = self.seconds.get("rollout", 0.0)
        others = sum(self.seconds.values()) - rollout
        return max(rollout, others) if self.config.rollout.iterations_ahead else rollout + others

    @property
    def checkpoint_bytes(self) -> int:
        """On disk, of one checkpoint."""
        return checkpoint_bytes(self.config, self.model)

    @property
    def checkpoint_seconds(self) -> float:
        """Until the nodes of the actor have written one, each its share."""
        nodes = math.ceil(self.config.actor.processes / self.cluster.node.gpus) if self.cluster.gpus else 1
        return self.checkpoint_bytes / nodes / (self.cluster.network.disk_gigabytes_per_second * 1e9)

    @property
    def interrupted_seconds(self) -> float:
        """The longest that a run needs after a signal: to end an update that has just begun, and to save."""
        return sum(self.seconds.get(phase, 0.0) for phase in _UPDATE_PHASES) + self.checkpoint_seconds

    @property
    def gpu_bytes(self) -> int:
        """Of one GPU, what a run may take."""
        return int(self.cluster.node.gpu_memory_gigabytes * 1e9 * _GPU_SHARE)

    @property
    def kept_state_bytes(self) -> int:
        """Of a GPU, optimizer states that stay there because there is room, beside what the actor needs."""
        return kept_state_bytes(self.config, self.model, self.cluster, self.memory)

    @property
    def held_beside_engines_bytes(self) -> int:
        """Of a shared GPU, what of the actor's stays there while engines generate because there is room, beside what
        the engine needs."""
        return held_beside_engines_bytes(self.config, self.model, self.cluster, self.memory)

    @property
    def idle_gpus(self) -> int:
        """GPUs of the cluster that the run does not use."""
        return max(0, self.cluster.gpus - self.config.needed_gpus)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each thing with which the run works, but may lose what it need not."""
        grace, needed = self.config.fault.grace_seconds, self.interrupted_seconds
        if not grace or needed <= grace or self.problems:
            return ()
        return (
            f"when it is interrupted, the run may need {needed:,.0f} seconds to end an update and to save "
            f"{in_units(self.checkpoint_bytes)}, but fault.grace_seconds is {grace:g}, after which it ends without a "
            f"checkpoint of that moment: raise it to {_rounded_up(needed * _GRACE_MARGIN):,} or more",
        )

    def within(self, share: float, names: Collection[str]) -> bool:
        """Whether the needs `names` take at most `share` of what is there."""
        return all(need.have is None or need.total <= need.have * share for need in self.needs if need.name in names)

    @property
    def problems(self) -> list[str]:
        """One sentence for each thing that does not fit."""
        problems = [
            f"{need.name}: {in_units(need.total)} needed, {in_units(need.have or 0)} there"
            for need in self.needs
            if not need.fits
        ]
        if self.cluster.gpus and self.config.needed_gpus > self.cluster.gpus:
            problems.append(f"GPUs: {self.config.needed_gpus} needed, {self.cluster.gpus} there")
        if self.config.sft is None and self.memory.engine.concurrency < 1:
            problems.append("engine: no room for a single request of the longest kind beside the weights")
        return problems


@dataclass(frozen=True)
class MeanTokens:
    """Mean lengths that a plan assumes of an iteration's prompts and responses; a limit where one is None."""

    prompt: int | None = None
    response: int | None = None


AT_LIMITS = MeanTokens()


def plan(config: Config, model: Model, cluster: ClusterConfig, means: MeanTokens = AT_LIMITS) -> Plan:
    """Plan a run whose prompts and responses have these mean lengths.

    Of settings that are `auto`, what needs least memory is chosen among those that train within 2 % of the fastest that
    fits with some room, or among all where nothing fits; then the largest share of memory for engines with which as
    little as possible does not fit. Only needs count that depend on the choice.
    """
    if not is_automatic(config):
        return _plan(config, model, cluster, means)
    smallest_engine = engine_candidates(config)[-1]
    chosen = _with_actor_choice(smallest_engine, model, cluster, means).config
    shares = [with_engine_share_of(chosen, one) for one in engine_candidates(config)]
    plans = [_plan(one, model, cluster, means) for one in shares]
    best = min(plans, key=lambda one: len(one.problems))
    return replace(best, notes=(choice_note(config, best.config),))


def _with_actor_choice(config: Config, model: Model, cluster: ClusterConfig, means: MeanTokens) -> Plan:
    plans = [_plan(candidate, model, cluster, means) for candidate in candidates(config)]
    sizes = {(need.name, need.total) for one in plans for need in one.needs}
    concerned = [name for name, count in Counter(name for name, _ in sizes).items() if count > 1]
    fitting = [one for one in plans if one.within(_ROOMY_SHARE, concerned)]
    fitting = fitting or [one for one in plans if one.within(1.0, concerned)]
    fastest = min((_judged_seconds(one) for one in fitting), default=0.0)
    near = [one for one in fitting if _judged_seconds(one) <= fastest * _NEAR_FASTEST] or plans
    return min(near, key=lambda one: sum(one.memory.actor.values()))


def _judged_seconds(one: Plan) -> float:
    return one.seconds["forward_backward"] * (_AGAIN if one.config.actor.recompute.chosen == "full" else 1.0)


def _plan(config: Config, model: Model, cluster: ClusterConfig, means: MeanTokens) -> Plan:
    memory = plan_memory(config, model, cluster)
    seconds = plan_seconds(config, model, cluster, memory, planned_lengths(config, means))
    return Plan(config, cluster, model, memory, _needs(config, cluster, memory), seconds)


def planned_lengths(config: Config, means: MeanTokens = AT_LIMITS) -> Lengths:
    """Of an iteration; examples of `sft` are responses without prompts."""
    if config.sft:
        return Lengths(0, means.response or config.sft.max_sequence_tokens, config.sft.sequences_per_step)
    return Lengths(
        prompt_tokens=means.prompt or config.data.max_prompt_tokens,
        response_tokens=means.response or config.longest_training_response_tokens,
        samples=config.rollout.prompts_per_iteration * config.rollout.samples_per_prompt,
    )


def _needs(config: Config, cluster: ClusterConfig, memory: Memory) -> tuple[Need, ...]:
    host = Need("host memory of a node", memory.host, int(cluster.node.memory_gigabytes * 1e9 * _HOST_SHARE))
    disk_bytes = None if cluster.node.disk_gigabytes is None else int(cluster.node.disk_gigabytes * 1e9)
    devices = tuple(_device_needs(config, cluster, memory))
    return (*(need for need in devices if need.parts), host, Need("disk", memory.disk, disk_bytes))


def _device_needs(config: Config, cluster: ClusterConfig, memory: Memory) -> Iterator[Need]:
    if not cluster.gpus:
        yield Need("actor process", memory.actor, None)
        yield Need("engine", memory.engine.parts, None)
        return
    have = int(cluster.node.gpu_memory_gigabytes * 1e9 * _GPU_SHARE)
    if config.sft or not config.ray.colocate:
        yield Need("actor GPU", memory.actor, have)
        yield Need("engine GPU", memory.engine.parts, have)
    elif config.ray.shares_memory(gpus=True):
        yield from _turns(memory, have)
    else:
        yield Need("GPU of actor and engine", _both(memory.actor, memory.engine.parts), have)


def _turns(memory: Memory, have: int) -> Iterator[Need]:
    """What is on a shared GPU at the three times when most is there."""
    actor, engine = memory.actor, memory.engine.parts
    stays = {name: actor[name] for name in STAYING_PARTS}
    graphs = {"graphs and workspace": engine["graphs and workspace"]}
    yield Need("GPU while the actor works", _both(actor, graphs), have)
    weights = {"parameters": actor["parameters"]}, {"parameters": engine["parameters"]}
    yield Need("GPU while weights pass", _both(weights[0] | stays, weights[1] | graphs), have)
    yield Need("GPU while the engine works", _both(stays, engine), have)


def _both(actor: Mapping[str, int], engine: Mapping[str, int]) -> dict[str, int]:
    return {f"actor {name}": size for name, size in actor.items()} | {
        f"engine {name}": size for name, size in engine.items()
    }


def _rounded_up(seconds: float) -> int:
    return math.ceil(seconds / 30) * 30


def in_units(size: int) -> str:
    """Bytes for people."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
