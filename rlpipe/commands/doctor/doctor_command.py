"""`rlpipe doctor [CONFIG]`: all checks, one line each."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rlpipe.commands.doctor.check import Check
from rlpipe.commands.doctor.devices import check_devices
from rlpipe.commands.doctor.machine import check_machine
from rlpipe.commands.doctor.nodes import check_nodes
from rlpipe.commands.doctor.packages import TORCH, check_packages, read_pins
from rlpipe.commands.doctor.run_checks import check_run
from rlpipe.config.load import load_config
from rlpipe.config.root import Config
from rlpipe.shared.project_files import REQUIREMENTS


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
    return {"torch": TORCH[kind]} | read_pins(REQUIREMENTS / f"{kind}.txt")


def _nodes(config: Config) -> Iterator[Check]:
    from rlpipe.training.placement import ray_cluster

    with ray_cluster(config):
        yield from check_nodes(config.deadlines.start_seconds)
