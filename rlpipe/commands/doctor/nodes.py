"""Clocks and versions of the nodes of a Ray cluster."""

import time
from collections.abc import Iterator

from rlpipe.commands.doctor.check import Check, ok, warn

_SKEW_SECONDS = 1.0


def check_nodes() -> Iterator[Check]:
    """Ray must be initialised. Each node's clock against this one, by half of the round trip."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    clock = ray.remote(num_cpus=0)(time.time)
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ray.get(clock.options(scheduling_strategy=strategy).remote())  # starts the worker
        before = time.time()
        there = ray.get(clock.options(scheduling_strategy=strategy).remote())
        after = time.time()
        skew = there - (before + after) / 2
        gpus = node["Resources"].get("GPU", 0)
        found = f"{node['NodeManagerAddress']}: clock differs by {skew * 1e3:+.0f} ms, {gpus:g} GPUs"
        if abs(skew) > _SKEW_SECONDS + (after - before) / 2:
            yield warn("node", found, "start chrony or ntpd there: times in logs and traces will not match")
        else:
            yield ok("node", found)
