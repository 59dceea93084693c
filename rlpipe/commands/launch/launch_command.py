"""From a run and a cluster to the command that starts it."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.commands.launch.clusters import PROJECT, check_gpus, load_cluster
from rlpipe.commands.launch.kubernetes import manifest
from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.load import load_config
from rlpipe.config.root import Config
from rlpipe.shared.errors import ConfigError, ResourceError

_PATH = re.compile(r"[~/][\w./~-]+")  # a string that YAML reads as itself
# What sbatch hands on besides the cluster's own variables; everything else stays on the submitting host.
_ALWAYS_EXPORTED = ("HOME", "PATH", "USER", "LANG")


@dataclass(frozen=True)
class Launch:
    """What would run. `environment`: variables set for it. `secrets`: names handed on where they are set.

    `text`: what the command reads from its standard input.
    """

    title: str
    environment: Mapping[str, str]
    secrets: tuple[str, ...]
    command: tuple[str, ...]
    text: str | None = None

    def script(self) -> str:
        """A shell script that does the same."""
        lines = ["#!/usr/bin/env bash", f"# {self.title}"]
        if self.secrets:
            lines.append(f"# Handed on from your environment where they are set: {', '.join(self.secrets)}")
        lines.append(f"cd {shlex.quote(str(PROJECT))} || exit")
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines.append(shlex.join(self.command) + (" <<'END'" if self.text else ""))
        return "\n".join(lines) + "\n" + (f"{self.text}END\n" if self.text else "")

    def run(self) -> int:
        """Run it and return its exit code. Raises ResourceError when the command is not installed."""
        if shutil.which(self.command[0]) is None:
            raise ResourceError(f"{self.command[0]} is not installed here: launch from a host that has it")
        done = subprocess.run(
            self.command, cwd=PROJECT, env={**os.environ, **self.environment}, input=self.text, text=True, check=False
        )
        return done.returncode


def launch(config_path: Path, overrides: Sequence[str], cluster_name: str) -> Launch:
    """What starts the run of `config_path` on a cluster. The cluster's settings stand under `overrides`.

    Raises ConfigError for a wrong file, ResourceError for a run that needs more GPUs than there are.
    """
    cluster = load_cluster(cluster_name)
    settings = [*_as_overrides(cluster.settings), *overrides]
    config = load_config(config_path, settings)
    check_gpus(config, cluster, cluster_name)
    arguments = (_in_project(config_path, cluster), *settings)
    title = f"rlpipe launch: run {config.run.name} on {cluster_name} ({cluster.kind}), {_size(config, cluster)}"
    return _LAUNCHERS[cluster.kind](config, cluster, title, arguments)


def _local(config: Config, cluster: ClusterConfig, title: str, arguments: tuple[str, ...]) -> Launch:
    return Launch(title, _environment(cluster), tuple(cluster.secrets), ("bash", "scripts/local.sh", *arguments))


def _ray(config: Config, cluster: ClusterConfig, title: str, arguments: tuple[str, ...]) -> Launch:
    """The raylets run already, so the workers' variables travel with the job."""
    variables = _environment(cluster)
    setup = {name: value for name, value in variables.items() if name == "RLPIPE_SETUP"}
    rest = {name: value for name, value in variables.items() if name not in setup}
    settings = [f"ray.nodes={cluster.nodes}", *([f"ray.environment={json.dumps(rest)}"] if rest else [])]
    command = ("bash", "scripts/ray_cluster.sh", cluster.ray_address, *arguments, *settings)
    return Launch(title, setup, tuple(cluster.secrets), command)


def _slurm(config: Config, cluster: ClusterConfig, title: str, arguments: tuple[str, ...]) -> Launch:
    slurm, node = cluster.slurm, cluster.node
    variables = _environment(cluster) | {
        "RLPIPE_ROOT": str(PROJECT),
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
        f"--export={','.join(names)}",
        *slurm.extra,
    ]
    return Launch(title, variables, tuple(cluster.secrets), ("sbatch", *options, "scripts/slurm.sbatch", *arguments))


def _kubernetes(config: Config, cluster: ClusterConfig, title: str, arguments: tuple[str, ...]) -> Launch:
    text = manifest(config, cluster, _environment(cluster), arguments)
    return Launch(title, {}, (), ("kubectl", "apply", "-f", "-"), text)


_LAUNCHERS = {"local": _local, "ray": _ray, "slurm": _slurm, "kubernetes": _kubernetes}


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


def _in_project(path: Path, cluster: ClusterConfig) -> str:
    """The file as the job's processes name it: relative to the project, which every node and image has."""
    absolute = path.resolve()
    if absolute.is_relative_to(PROJECT):
        return str(absolute.relative_to(PROJECT))
    if cluster.kind == "kubernetes":
        raise ConfigError(f"{path} is outside of {PROJECT}, so the image does not hold it: move it below configs/")
    return str(absolute)


def _size(config: Config, cluster: ClusterConfig) -> str:
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"
    if not cluster.gpus:
        return f"{nodes} without GPUs"
    return f"{nodes} x {cluster.node.gpus} GPUs, of which the run uses {config.needed_gpus}"
