"""Clocks and versions of the nodes of a Ray cluster."""

import time
from collections.abc import Iterator

from rlpipe.commands.doctor.check import Check, fail, ok, warn

_SKEW_SECONDS = 1.0


def check_nodes(deadline_seconds: float) -> Iterator[Check]:
    """Ray must be initialised. Each node's clock against this one, by half of the round trip.

    deadline_seconds: longest time of each of a node's two answers.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    clock = ray.remote(num_cpus=0)(time.time)
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        task = clock.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        try:
            ray.get(task.remote(), timeout=deadline_seconds)  # starts the worker
            before = time.time()
            there = ray.get(task.remote(), timeout=deadline_seconds)
        except ray.exceptions.RayError as error:
            name = type(error).__name__
            found = f"{node['NodeManagerAddress']}: no answer within {deadline_seconds:g} seconds ({name})"
            yield fail("node", found, "look at `ray status` and at the raylet's log on that node")
            continue
        after = time.time()
        skew = there - (before + after) / 2
        gpus = node["Resources"].get("GPU", 0)
        found = f"{node['NodeManagerAddress']}: clock differs by {skew * 1e3:+.0f} ms, {gpus:g} GPUs"
        if abs(skew) > _SKEW_SECONDS + (after - before) / 2:
            yield warn("node", found, "start chrony or ntpd there: times in logs and traces will not match")
        else:
            yield ok("node", found)
