"""Reserving a Ray cluster's resources for engines and actor processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rlpipe.config.root import Config
from rlpipe.shared.errors import ResourceError

_RESERVE_SECONDS = 60.0


@dataclass(frozen=True)
class Placement:
    """The reserved bundles of one role.

    bundles: the bundle of each of its processes; processes of a node follow each other.
    devices: of each process the GPUs that it is to use, where it needs more than those of its own bundle.
    """

    group: Any
    bundles: tuple[int, ...]
    gpus_per_bundle: float
    devices: tuple[tuple[str, ...], ...] = ()

    def strategy(self, index: int) -> Any:
        """Ray scheduling strategy that puts process `index` into its bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[index])

    def devices_of(self, index: int) -> tuple[str, ...]:
        """GPUs that process `index` is to use; empty where Ray's choice stands."""
        return self.devices[index] if self.devices else ()


@contextmanager
def placements(config: Config) -> Iterator[tuple[Placement, Placement]]:
    """Bundles of (actor processes, engines); given back at the end. Raises ResourceError when they do not fit."""
    if config.ray.colocate:
        with _reserved("colocated", config.actor.processes, 1, config, cpus=2) as shared:
            half = replace(shared, gpus_per_bundle=shared.gpus_per_bundle / 2)
            yield half, _engines_among(half, config)
        return
    with actor_placement(config) as actor, engine_placement(config) as engines:
        yield actor, engines


@contextmanager
def actor_placement(config: Config) -> Iterator[Placement]:
    """Bundles of the actor's processes alone; given back at the end. Raises ResourceError when they do not fit."""
    with _reserved("actor", config.actor.processes, 1, config) as placement:
        yield placement


@contextmanager
def engine_placement(config: Config) -> Iterator[Placement]:
    """Bundles of the engines alone; given back at the end. Raises ResourceError when they do not fit."""
    with _reserved("engine", config.rollout.engines, config.rollout.engine.tensor_parallel, config) as placement:
        yield placement


def cluster_gpus() -> int:
    """GPUs of the cluster, all nodes."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def _engines_among(actor: Placement, config: Config) -> Placement:
    """Each engine beside the next `tensor_parallel` processes of the actor, in the bundle of the first.

    Raises ResourceError for an engine whose GPUs belong to two nodes.
    """
    size = config.rollout.engine.tensor_parallel
    parts = [actor.bundles[index * size :][:size] for index in range(config.rollout.engines)]
    nodes = _nodes_of_bundles(actor.group)
    for index, part in enumerate(parts):
        if len({nodes[bundle] for bundle in part}) > 1:
            raise ResourceError(
                f"ray: engine {index} would have its {size} GPUs on two nodes; choose a "
                "rollout.engine.tensor_parallel that divides the number of actor processes on each node"
            )
    heads = replace(actor, bundles=tuple(part[0] for part in parts))
    if size == 1 or not actor.gpus_per_bundle:
        return heads
    gpus = _gpus_of_bundles(actor, config.deadlines.start_seconds)
    return replace(heads, devices=tuple(tuple(gpus[bundle] for bundle in part) for part in parts))


def _nodes_of_bundles(group: Any) -> dict[int, str]:
    from ray.util import placement_group_table

    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return nodes


def _gpus_of_bundles(placement: Placement, deadline_seconds: float) -> dict[int, str]:
    """Ray's id of the GPU of each bundle, as CUDA_VISIBLE_DEVICES takes it. Raises ResourceError when that is late."""
    import ray

    task = ray.remote(num_cpus=0, num_gpus=placement.gpus_per_bundle)(_gpu_here)
    answers = [
        task.options(scheduling_strategy=placement.strategy(index)).remote() for index in range(len(placement.bundles))
    ]
    try:
        return dict(zip(placement.bundles, ray.get(answers, timeout=deadline_seconds), strict=True))
    except ray.exceptions.GetTimeoutError:
        raise ResourceError(
            f"ray: a node did not say within {deadline_seconds:g} seconds which GPUs it gave the actor; look at `ray "
            "status`, or raise deadlines.start_seconds"
        ) from None


def _gpu_here() -> str:
    import ray

    (gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return gpu


@contextmanager
def _reserved(role: str, bundles: int, gpus: int, config: Config, cpus: int = 1) -> Iterator[Placement]:
    import ray
    from ray.util import placement_group, remove_placement_group

    gpus = gpus if cluster_gpus() else 0
    bundle = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    group = placement_group([bundle] * bundles, strategy="PACK", name=f"{config.run.name}-{role}")
    try:
        if not group.wait(min(_RESERVE_SECONDS, config.deadlines.start_seconds)):
            have = {name: value for name, value in ray.available_resources().items() if name in ("CPU", "GPU")}
            raise ResourceError(
                f"ray: {bundles} x {bundle} for role {role!r} do not fit the free resources {have}; lower "
                "actor.processes or rollout.engines, raise ray.cpus, or add nodes"
            )
        nodes = _nodes_of_bundles(group)
        seen = list(dict.fromkeys(nodes[bundle] for bundle in range(bundles)))
        order = sorted(range(bundles), key=lambda bundle: seen.index(nodes[bundle]))
        yield Placement(group, tuple(order), gpus)
    finally:
        remove_placement_group(group)
