"""From a run and a cluster to the command that starts it."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.commands.launch.clusters import check_gpus, load_cluster
from rlpipe.commands.launch.kubernetes import manifest
from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.load import load_config
from rlpipe.config.root import Config
from rlpipe.shared.errors import ConfigError, ResourceError
from rlpipe.shared.project_files import ROOT, SCRIPTS

_PATH = re.compile(r"[~/][\w./~-]+")  # a string that YAML reads as itself
# What sbatch hands on besides the cluster's own variables; everything else stays on the submitting host.
_ALWAYS_EXPORTED = ("HOME", "PATH", "USER", "LANG")


@dataclass(frozen=True)
class Launch:
    """What would run in the working folder `folder`. `environment`: variables set for it. `secrets`: names handed on
    where they are set.

    `text`: what the command reads from its standard input.
    """

    title: str
    folder: Path
    environment: Mapping[str, str]
    secrets: tuple[str, ...]
    command: tuple[str, ...]
    text: str | None = None

    def script(self) -> str:
        """A shell script that does the same."""
        lines = ["#!/usr/bin/env bash", f"# {self.title}"]
        if self.secrets:
            lines.append(f"# Handed on from your environment where they are set: {', '.join(self.secrets)}")
        lines.append(f"cd {shlex.quote(str(self.folder))} || exit")
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines.append(shlex.join(self.command) + (" <<'END'" if self.text else ""))
        return "\n".join(lines) + "\n" + (f"{self.text}END\n" if self.text else "")

    def run(self) -> int:
        """Run it and return its exit code. Raises ResourceError when the command is not installed."""
        if shutil.which(self.command[0]) is None:
            raise ResourceError(f"{self.command[0]} is not installed here: launch from a host that has it")
        done = subprocess.run(
            self.command,
            cwd=self.folder,
            env={**os.environ, **self.environment},
            input=self.text,
            text=True,
            check=False,
        )
        return done.returncode


def launch(config_path: Path, overrides: Sequence[str], cluster_name: str) -> Launch:
    """What starts the run of `config_path` on a cluster, in the folder that the command runs in. The cluster's settings
    stand under `overrides`.

    Raises ConfigError for a wrong file, ResourceError for a run that needs more GPUs than there are.
    """
    cluster = load_cluster(cluster_name)
    settings = [*_as_overrides(cluster.settings), *overrides]
    config = load_config(config_path, settings)
    check_gpus(config, cluster, cluster_name)
    arguments = (_as_seen_by_the_job(config_path, cluster), *settings)
    title = f"rlpipe launch: run {config.run.name} on {cluster_name} ({cluster.kind}), {_size(config, cluster)}"
    return _LAUNCHERS[cluster.kind](config, cluster, title, arguments)


def _local(config: Config, cluster: ClusterConfig, title: str, arguments: tuple[str, ...]) -> Launch:
    command = ("bash", str(SCRIPTS / "local.sh"), *arguments)
    return Launch(title, Path.cwd(), _programs() | _environment(cluster), tuple(cluster.secrets), command)


def _ray(config: Config, cluster: ClusterConfig, title: str, arguments: tuple[str, ...]) -> Launch:
    """The raylets run already, so the workers' variables travel with the job."""
    variables = _environment(cluster)
    setup = _programs() | {name: value for name, value in variables.items() if name == "RLPIPE_SETUP"}
    rest = {name: value for name, value in variables.items() if name not in setup}
    settings = [f"ray.nodes={cluster.nodes}", *([f"ray.environment={json.dumps(rest)}"] if rest else [])]
    command = ("bash", str(SCRIPTS / "ray_cluster.sh"), cluster.ray_address, *arguments, *settings)
    return Launch(title, Path.cwd(), setup, tuple(cluster.secrets), command)


def _slurm(config: Config, cluster: ClusterConfig, title: str, arguments: tuple[str, ...]) -> Launch:
    slurm, node = cluster.slurm, cluster.node
    variables = _environment(cluster) | {
        **_programs(),
        "RLPIPE_SCRIPTS": str(SCRIPTS),
        "RLPIPE_RAY_PORT": str(cluster.ray_port),
        "RLPIPE_NODE_CPUS": str(node.cpus),
        "RLPIPE_NODE_GPUS": str(node.gpus),
    }
    names = (*_ALWAYS_EXPORTED, *variables, *cluster.secrets)
    options = [
        f"--job-name={config.run.name}",
        f"--nodes={cluster.nodes}",
        f"--cpus-per-task={node.cpus}",
        f"--mem={int(node.memory_gigabytes * 1000)}M",
        f"--time={slurm.time_limit}",
        *([f"--gpus-per-node={node.gpus}"] if node.gpus else []),
        *([f"--partition={slurm.partition}"] if slurm.partition else []),
        *([f"--account={slurm.account}"] if slurm.account else []),
        f"--chdir={Path.cwd()}",
        f"--export={','.join(names)}",
        *slurm.extra,
    ]
    command = ("sbatch", *options, str(SCRIPTS / "slurm.sbatch"), *arguments)
    return Launch(title, Path.cwd(), variables, tuple(cluster.secrets), command)


def _kubernetes(config: Config, cluster: ClusterConfig, title: str, arguments: tuple[str, ...]) -> Launch:
    text = manifest(config, cluster, _environment(cluster), arguments)
    return Launch(title, Path.cwd(), {}, (), ("kubectl", "apply", "-f", "-"), text)


_LAUNCHERS = {"local": _local, "ray": _ray, "slurm": _slurm, "kubernetes": _kubernetes}


def _programs() -> dict[str, str]:
    """Where the scripts find `rlpipe` and `ray`: beside the Python that runs this."""
    return {"RLPIPE_PROGRAMS": str(Path(sys.executable).parent)}


def _environment(cluster: ClusterConfig) -> dict[str, str]:
    """Variables of every process, those of the cluster file last."""
    network = cluster.network
    variables: dict[str, str] = {}
    if network.socket_interface:
        variables |= {"NCCL_SOCKET_IFNAME": network.socket_interface, "GLOO_SOCKET_IFNAME": network.socket_interface}
    if network.infiniband_devices:
        variables["NCCL_IB_HCA"] = "=" + ",".join(network.infiniband_devices)
    if cluster.setup:
        variables["RLPIPE_SETUP"] = "\n".join(cluster.setup)
    return variables | cluster.environment


def _as_overrides(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """{"a": {"b": 1}} -> ["a.b=1"]."""
    overrides = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            overrides += _as_overrides(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) and _PATH.fullmatch(value) else json.dumps(value, ensure_ascii=False)
            overrides.append(f"{prefix}{key}={text}")
    return overrides


def _as_seen_by_the_job(path: Path, cluster: ClusterConfig) -> str:
    """The configuration's file as the job's processes name it: an image has the project's own files in its working
    folder, and a volume where pods mount it; elsewhere the job runs in the folder that the command runs in.
    """
    absolute = path.resolve()
    if cluster.kind != "kubernetes":
        return str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute)
    if absolute.is_relative_to(ROOT):
        return str(absolute.relative_to(ROOT))
    mounts = [volume.path for volume in cluster.kubernetes.volumes] if cluster.kubernetes else []
    if any(absolute.is_relative_to(mount) for mount in mounts):
        return str(absolute)
    raise ConfigError(
        f"{path} is neither in the image nor on a volume of the pods ({', '.join(mounts) or 'the cluster has none'}): "
        "move it onto such a volume, mounted here at the same place, or below configs/ of the checkout that the image "
        "is built from"
    )


def _size(config: Config, cluster: ClusterConfig) -> str:
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"
    if not cluster.gpus:
        return f"{nodes} without GPUs"
    return f"{nodes} x {cluster.node.gpus} GPUs, of which the run uses {config.needed_gpus}"
