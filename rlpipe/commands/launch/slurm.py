"""The sbatch command of a run: what Slurm is asked for, what its job's script is told, and the container it uses."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlpipe.config.cluster import ClusterConfig, ContainerConfig
from rlpipe.config.root import Config
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.project_files import ROOT, SCRIPTS

# What sbatch hands on besides the cluster's own variables; everything else stays on the submitting host.
_ALWAYS_EXPORTED = ("HOME", "PATH", "USER", "LANG")
_ENDING_SECONDS = 120
"""Between the saved checkpoint and the time limit: the run ends its processes, nodes hand in their logs."""


def job_variables(cluster: ClusterConfig, programs: str) -> dict[str, str]:
    """What scripts/slurm.sbatch reads. `programs`: folder of `rlpipe` and `ray` where no container is used."""
    container, node = cluster.slurm.container, cluster.node
    variables = {
        "RLPIPE_PROGRAMS": container.programs if container else programs,
        "RLPIPE_SCRIPTS": str(SCRIPTS),
        "RLPIPE_RAY_PORT": str(cluster.ray_port),
        "RLPIPE_NODE_CPUS": str(node.cpus),
        "RLPIPE_NODE_GPUS": str(node.gpus),
        "RLPIPE_MAX_REQUEUES": str(cluster.slurm.requeues),
    }
    if container is None:
        return variables
    if container.runtime == "pyxis":
        return variables | {"RLPIPE_STEP_OPTIONS": shlex.join(_pyxis(container))}
    return variables | {"RLPIPE_STEP_PREFIX": shlex.join(_apptainer(container, gpus=node.gpus > 0))}


def sbatch(
    config: Config, cluster: ClusterConfig, variables: Mapping[str, str], arguments: Sequence[str]
) -> tuple[str, ...]:
    """The command that submits the run. Raises ConfigError for a time limit that leaves no time to train."""
    slurm, node = cluster.slurm, cluster.node
    ahead = math.ceil(config.fault.grace_seconds) + _ENDING_SECONDS
    if slurm.time_limit_seconds <= ahead:
        raise ConfigError(
            f"slurm.time_limit is {slurm.time_limit}, but the job is told to save {ahead} seconds before it "
            f"(fault.grace_seconds and {_ENDING_SECONDS} more): raise it"
        )
    chosen = {
        "gpus-per-node": node.gpus or None,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "reservation": slurm.reservation,
    }
    return (
        "sbatch",
        f"--job-name={config.run.name}",
        f"--nodes={cluster.nodes}",
        f"--cpus-per-task={node.cpus}",
        f"--mem={int(node.memory_gigabytes * 1000)}M",
        f"--time={slurm.time_limit}",
        f"--signal=B:USR1@{ahead}",
        *(f"--{name}={value}" for name, value in chosen.items() if value),
        f"--chdir={Path.cwd()}",
        f"--export={','.join((*_ALWAYS_EXPORTED, *variables, *cluster.secrets))}",
        *slurm.extra,
        str(SCRIPTS / "slurm.sbatch"),
        *arguments,
    )


def _pyxis(container: ContainerConfig) -> list[str]:
    mounts = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in _mounts(container))
    return [
        f"--container-image={container.image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={Path.cwd()}",
        *container.options,
    ]


def _apptainer(container: ContainerConfig, gpus: bool) -> list[str]:
    binds = [f"--bind={mount}" for mount in _mounts(container)]
    return [
        "apptainer",
        "exec",
        *(["--nv"] if gpus else []),
        f"--pwd={Path.cwd()}",
        *binds,
        *container.options,
        container.image,
    ]


def _mounts(container: ContainerConfig) -> list[str]:
    return list(dict.fromkeys([str(Path.cwd()), str(ROOT), *container.mounts]))
