"""`rlpipe doctor [CONFIG]`: all checks, one line each."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rlpipe.config.load import load_config
from rlpipe.config.root import Config
from rlpipe.doctor.check import Check
from rlpipe.doctor.cluster import check_nodes
from rlpipe.doctor.devices import check_devices
from rlpipe.doctor.machine import check_machine
from rlpipe.doctor.packages import TORCH, check_packages, read_pins
from rlpipe.doctor.run import check_run
from rlpipe.launch.clusters import PROJECT


def diagnose(path: Path | None, overrides: Sequence[str], quick: bool) -> Iterator[Check]:
    """Checks of this machine; with a configuration also of its run and its Ray cluster. Raises ConfigError."""
    config = load_config(path, overrides) if path is not None else None
    yield from check_packages(_pins())
    yield from check_machine(Path(config.run.directory) if config else Path("runs"))
    yield from check_devices(config.actor.gdn_backend if config else "auto")
    if config is None or path is None:
        return
    if config.ray.address:
        yield from _nodes(config)
    yield from check_run(config, path, overrides, quick)


def _pins() -> dict[str, str]:
    """Of the device that this torch was built for."""
    import torch

    kind = "gpu" if torch.cuda.is_available() else "cpu"
    return {"torch": TORCH[kind]} | read_pins(PROJECT / "requirements" / f"{kind}.txt")


def _nodes(config: Config) -> Iterator[Check]:
    from rlpipe.placement import ray_cluster

    with ray_cluster(config):
        yield from check_nodes()
