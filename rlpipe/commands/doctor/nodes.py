"""The nodes of a Ray cluster: each one's clock, memory, load and GPUs, and whether all are alike."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlpipe.commands.doctor.check import Check, fail, ok, warn
from rlpipe.commands.doctor.node_facts import NodeFacts, clock, node_facts
from rlpipe.config.cluster import NodeConfig

_SKEW_SECONDS = 1.0
_BUSY_SHARE = 0.5  # of the cores, before a run starts
_FREE_SHARE = 0.5  # of a node's memory
_USED_GPU_BYTES = 2**30
_PACKAGES = ("rlpipe", "ray", "torch", "sglang", "megatron-core", "transformers", "tokenizers", "nvidia-nccl-cu13")


def check_nodes(deadline_seconds: float, described: NodeConfig | None = None) -> Iterator[Check]:
    """Ray must be initialised.

    deadline_seconds: longest time of all nodes' answers. described: what the cluster's file says of a node.
    """
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    found: list[NodeFacts] = []
    for node, asked in zip(alive, [_ask(node) for node in alive], strict=True):
        try:
            facts = ray.get(asked, timeout=deadline_seconds)
            skew, doubt = _skew(node, deadline_seconds)
        except ray.exceptions.RayError as error:
            yield _no_answer(node["NodeManagerAddress"], error, deadline_seconds)
            continue
        gpus = float(node["Resources"].get("GPU", 0))
        found.append(replace(facts, skew_seconds=skew, reported_gpus=gpus))
        yield judge_node(found[-1], doubt, described)
    if found:
        yield from judge_together(found)


def judge_node(node: NodeFacts, doubt_seconds: float = 0.0, described: NodeConfig | None = None) -> Check:
    """One line for a node: what is worst about it, or what it has. doubt_seconds: of the clock's difference."""
    used = sum(gpu.used_bytes > _USED_GPU_BYTES for gpu in node.gpus)
    found = (
        f"{node.address}: clock differs by {node.skew_seconds * 1e3:+.0f} ms, {node.reported_gpus:g} GPUs, load "
        f"{node.load:.1f} on {node.cores} cores, {node.free_bytes / 1e9:.1f} of {node.memory_bytes / 1e9:.1f} GB free"
    )
    if described is not None and (short := _short_of(node, described)):
        return fail(
            "node", found, f"the cluster's file says {short}: correct it, or the node's share of Ray's resources"
        )
    if abs(node.skew_seconds) > _SKEW_SECONDS + doubt_seconds:
        return warn("node", found, "start chrony or ntpd there: times in logs and traces will not match")
    if used:
        return warn("node", found, f"{used} of its GPUs hold more than 1 GiB of something else: see nvidia-smi there")
    if node.load > _BUSY_SHARE * node.cores:
        return warn("node", found, "something else runs there: end it, or expect slower and uneven phases")
    if node.free_bytes < _FREE_SHARE * node.memory_bytes:
        return warn("node", found, "something else has its memory: end it")
    return ok("node", found)


def judge_together(nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    """Whether all nodes have the same versions, drivers and GPUs, and which of them reach the hub."""
    names = sorted({name for node in nodes for name in node.versions})
    groups = {name: _groups({node.address: node.versions.get(name, "missing") for node in nodes}) for name in names}
    differing = {name: found for name, found in groups.items() if len(found) > 1}
    for name, found in differing.items():
        yield fail("versions of nodes", f"{name}: {_listed(found)}", "install the same on every node")
    if not differing:
        count = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"
        yield ok("versions of nodes", f"{count} with the same Python and packages")
    drivers = {node.address: ", ".join(sorted({gpu.driver for gpu in node.gpus})) for node in nodes}
    yield from _alike("driver", drivers, "install the same driver everywhere")
    kinds = {node.address: ", ".join(gpu.name for gpu in node.gpus) for node in nodes}
    yield from _alike("GPUs of nodes", kinds, "give a job nodes of one kind")
    yield _hub(nodes)


def _alike(name: str, by_address: Mapping[str, str], fix: str) -> Iterator[Check]:
    """Nothing where no node has any."""
    found = _groups({address: value or "none" for address, value in by_address.items()})
    if len(found) > 1:
        yield warn(name, _listed(found), fix)
    elif "none" not in found:
        yield ok(name, next(iter(found)))


def _hub(nodes: Sequence[NodeFacts]) -> Check:
    problems = {node.address: node.hub for node in nodes if node.hub}
    if problems:
        fix = "models and data by name must be in the cache that HF_HOME names there, with HF_HUB_OFFLINE=1"
        return warn("hub", "; ".join(f"{address}: {problem}" for address, problem in problems.items()), fix)
    offline = sum(node.hub is None for node in nodes)
    return ok("hub", f"not asked, HF_HUB_OFFLINE is set on {offline} nodes" if offline else "answers every node")


def _short_of(node: NodeFacts, described: NodeConfig) -> str:
    """What the cluster's file promises and the node does not have."""
    wanted = (
        (f"{described.gpus} GPUs", node.reported_gpus < described.gpus),
        (f"{described.cpus} cores", node.cores < described.cpus),
        (f"{described.memory_gigabytes:g} GB", node.memory_bytes < described.memory_gigabytes * 1e9),
        (f"{described.gpu}", bool(described.gpu and node.gpus) and {one.name for one in node.gpus} != {described.gpu}),
    )
    return ", ".join(text for text, is_short in wanted if is_short)


def _groups(by_address: Mapping[str, str]) -> dict[str, list[str]]:
    """Addresses of the nodes that share a value."""
    groups: dict[str, list[str]] = defaultdict(list)
    for address, value in by_address.items():
        groups[value].append(address)
    return groups


def _listed(groups: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value} on {', '.join(addresses)}" for value, addresses in groups.items())


def _ask(node: Mapping[str, Any]) -> Any:
    return _on(node, node_facts).remote(node["NodeManagerAddress"], _PACKAGES)


def _on(node: Mapping[str, Any], function: Callable[..., Any]) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=strategy)


def _skew(node: Mapping[str, Any], deadline_seconds: float) -> tuple[float, float]:
    """Its clock less this one, by half of a round trip to a worker that runs; and how wrong that may be."""
    import ray

    task = _on(node, clock)
    ray.get(task.remote(), timeout=deadline_seconds)
    before = time.time()
    there = ray.get(task.remote(), timeout=deadline_seconds)
    after = time.time()
    return there - (before + after) / 2, (after - before) / 2


def _no_answer(address: str, error: Exception, deadline_seconds: float) -> Check:
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, ModuleNotFoundError):
        return fail("node", f"{address}: {cause}", "install rlpipe there, in the environment that starts Ray")
    found = f"{address}: no answer within {deadline_seconds:g} seconds ({type(error).__name__})"
    return fail("node", found, "look at `ray status` and at the raylet's log on that node")
