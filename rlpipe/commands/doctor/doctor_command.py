"""`rlpipe doctor [CONFIG]`: all checks, one line each."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rlpipe.commands.clusters import load_cluster
from rlpipe.commands.doctor.check import Check
from rlpipe.commands.doctor.devices import check_devices
from rlpipe.commands.doctor.machine import check_machine
from rlpipe.commands.doctor.nodes import check_nodes
from rlpipe.commands.doctor.packages import TORCH, check_packages, read_pins
from rlpipe.commands.doctor.run_checks import check_run
from rlpipe.config.base import is_ray_address
from rlpipe.config.cluster import NodeConfig
from rlpipe.config.load import load_config
from rlpipe.config.root import Config
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.project_files import CONFIGS, REQUIREMENTS


def diagnose(path: Path | None, overrides: Sequence[str], quick: bool, cluster: str | None = None) -> Iterator[Check]:
    """Checks of this machine; with a configuration also of its run and its Ray cluster.

    cluster: a Ray cluster whose nodes are checked, and this machine is not: an address, or the name of a cluster's file
    of kind "ray". Raises ConfigError.
    """
    if cluster is not None:
        yield from check_cluster(cluster)
        return
    config = load_config(path, overrides) if path is not None else None
    yield from check_packages(_pins())
    yield from check_machine(Path(config.run.directory) if config else Path("runs"))
    yield from check_devices(config.actor.gdn_backend if config else "auto")
    if config is None or path is None:
        return
    if config.ray.address:
        yield from _nodes(config)
    yield from check_run(config, path, overrides, quick)


def check_cluster(cluster: str) -> Iterator[Check]:
    """Its nodes. Raises ConfigError for a cluster that is no running Ray cluster."""
    address, nodes, described = cluster, 1, None
    if not is_ray_address(cluster):
        file = load_cluster(cluster)
        if file.kind != "ray":
            raise ConfigError(
                f"doctor --cluster asks nodes of a Ray cluster that runs, but {cluster!r} is of kind {file.kind!r}: "
                "give the host:port of its Ray head, or auto on one of its nodes"
            )
        address, nodes, described = file.ray_address, file.nodes, file.node
    settings = [f"ray.address={address}", f"ray.nodes={nodes}", "run.name=doctor"]
    yield from _nodes(load_config(CONFIGS / "demo" / "arithmetic.yaml", settings), described)


def _pins() -> dict[str, str]:
    """Of the device that this torch was built for."""
    import torch

    kind = "gpu" if torch.cuda.is_available() else "cpu"
    return {"torch": TORCH[kind]} | read_pins(REQUIREMENTS / f"{kind}.txt")


def _nodes(config: Config, described: NodeConfig | None = None) -> Iterator[Check]:
    from rlpipe.training.ray_cluster import ray_cluster

    with ray_cluster(config):
        yield from check_nodes(config.deadlines.start_seconds, described)
