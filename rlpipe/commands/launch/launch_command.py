"""From a run and a cluster to the command that starts it."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlpipe.commands.clusters import check_gpus, load_cluster, settings_of
from rlpipe.commands.launch.kubernetes import manifest
from rlpipe.commands.launch.scheduler_program import require
from rlpipe.commands.launch.slurm import job_variables, sbatch
from rlpipe.commands.plan.plan_command import run_plan
from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.load import load_config
from rlpipe.config.root import Config
from rlpipe.shared.errors import ConfigError, ModelError, ResourceError
from rlpipe.shared.project_files import ROOT, SCRIPTS


@dataclass(frozen=True)
class Launch:
    """What would run in the working folder `folder`. `environment`: variables set for it. `secrets`: names handed on
    where they are set.

    `text`: what the command reads from its standard input. `plan`: what `rlpipe plan` says of the run, in one line.
    """

    title: str
    folder: Path
    environment: Mapping[str, str]
    secrets: tuple[str, ...]
    command: tuple[str, ...]
    text: str | None = None
    plan: str = ""

    def script(self) -> str:
        """A shell script that does the same."""
        lines = ["#!/usr/bin/env bash", f"# {self.title}", *([f"# {self.plan}"] if self.plan else [])]
        if self.secrets:
            lines.append(f"# Handed on from your environment where they are set: {', '.join(self.secrets)}")
        lines.append(f"cd {shlex.quote(str(self.folder))} || exit")
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines.append(shlex.join(self.command) + (" <<'END'" if self.text else ""))
        return "\n".join(lines) + "\n" + (f"{self.text}END\n" if self.text else "")

    def run(self) -> int:
        """Run it and return its exit code. Raises ResourceError when the command is not installed."""
        require(self.command[0])
        done = subprocess.run(
            self.command,
            cwd=self.folder,
            env={**os.environ, **self.environment},
            input=self.text,
            text=True,
            check=False,
        )
        return done.returncode


def launch(config_path: Path, overrides: Sequence[str], cluster_name: str, force: bool = False) -> Launch:
    """What starts the run of `config_path` on a cluster, in the folder that the command runs in. The cluster's settings
    stand under `overrides`.

    Raises ConfigError for a wrong file, ResourceError for a run that needs more GPUs than there are or that does not
    fit by its plan. force: launch what does not fit all the same.
    """
    cluster = load_cluster(cluster_name)
    settings = [*settings_of(cluster), *overrides]
    config = load_config(config_path, settings)
    check_gpus(config, cluster, cluster_name)
    planned = _plan_line(config, config_path, overrides, cluster_name, force)
    arguments = (_as_seen_by_the_job(config_path, cluster), *settings)
    title = f"rlpipe launch: run {config.run.name} on {cluster_name} ({cluster.kind}), {_size(config, cluster)}"
    return replace(_LAUNCHERS[cluster.kind](config, cluster, title, arguments), plan=planned)


def _plan_line(config: Config, path: Path, overrides: Sequence[str], cluster_name: str, force: bool) -> str:
    """Raises ResourceError where the run does not fit. Empty for a policy that is made at the start, which is small."""
    if config.prepare.policy is not None:
        return ""
    try:
        answer = run_plan(path, overrides, cluster_name)
    except ModelError as error:
        return f"Not planned, its model cannot be read here: {error}"
    if answer.fits:
        seconds = answer.planned.step_seconds or 0.0
        return f"By rlpipe plan it fits, at {seconds:,.1f} s an iteration"
    problems = "; ".join(answer.planned.problems)
    if force:
        return f"By rlpipe plan it does not fit ({problems}), launched with --force"
    advice = f"set {' '.join(answer.nearest)}" if answer.nearest else "use more nodes, or a smaller model"
    raise ResourceError(
        f"the run does not fit cluster {cluster_name!r} by its plan: {problems}; {advice}, or add --force where the "
        "plan is wrong"
    )


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
    variables = job_variables(cluster, _programs()["RLPIPE_PROGRAMS"]) | _environment(cluster)
    command = sbatch(config, cluster, variables, arguments)
    return Launch(title, Path.cwd(), variables, tuple(cluster.secrets), command)


def _kubernetes(config: Config, cluster: ClusterConfig, title: str, arguments: tuple[str, ...]) -> Launch:
    text = manifest(config, cluster, _environment(cluster))
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


def _as_seen_by_the_job(path: Path, cluster: ClusterConfig) -> str:
    """The configuration's file as the job's processes name it, which run in the folder that the command runs in. In a
    container they see that folder, rlpipe's own files and the mounts. Raises ConfigError for another place.
    """
    absolute = path.resolve()
    container = cluster.slurm.container if cluster.kind == "slurm" else None
    if container:
        seen = {Path.cwd(): Path.cwd(), ROOT: ROOT}
        for mount in container.mounts:
            folder, there, *_ = [*mount.split(":"), mount]  # a mount without another place is at its own
            seen[Path(folder)] = Path(there)
        holding = next((folder for folder in seen if absolute.is_relative_to(folder)), None)
        if holding is None:
            raise ConfigError(
                f"{path} is not in the job's container, which sees {', '.join(map(str, seen))}: move it there, or add "
                "its folder to slurm.container.mounts"
            )
        absolute = seen[holding] / absolute.relative_to(holding)
    return str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute)


def _size(config: Config, cluster: ClusterConfig) -> str:
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"
    if not cluster.gpus:
        return f"{nodes} without GPUs"
    return f"{nodes} x {cluster.node.gpus} GPUs, of which the run uses {config.needed_gpus}"
