"""Cluster files: finding one by name, and whether a run fits the cluster's GPUs."""

import difflib
from pathlib import Path

from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.load import load_section
from rlpipe.config.root import Config
from rlpipe.shared.errors import ConfigError, ResourceError
from rlpipe.shared.project_files import CLUSTERS


def load_cluster(name: str) -> ClusterConfig:
    """The cluster `name`: a file, or the name of one in configs/clusters. Raises ConfigError."""
    for candidate in (Path(name), CLUSTERS / f"{name}.yaml"):
        if candidate.is_file():
            return load_section(ClusterConfig, candidate)
    known = cluster_names()
    near = difflib.get_close_matches(name, known, 1)
    advice = f"did you mean {near[0]!r}?" if near else f"give a file{', or one of ' if known else ''}{', '.join(known)}"
    raise ConfigError(f"there is no cluster {name!r}: {advice}")


def cluster_names() -> list[str]:
    """Names in configs/clusters."""
    return sorted(path.stem for path in CLUSTERS.glob("*.yaml"))


def check_gpus(config: Config, cluster: ClusterConfig, name: str) -> None:
    """Raises ResourceError when the run reserves more GPUs than the cluster has; a CPU cluster takes any run."""
    needed = config.needed_gpus
    if cluster.gpus and needed > cluster.gpus:
        raise ResourceError(
            f"the run needs {needed} GPUs ({config.actor.processes} for the actor, {config.rollout.engines} engines of "
            f"{config.rollout.engine.tensor_parallel}), but cluster {name!r} has {cluster.gpus}: "
            f"set nodes in its file to {-(-needed // cluster.node.gpus)}, or lower actor.processes or rollout.engines"
        )
