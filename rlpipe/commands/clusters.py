"""Cluster files: finding one by name, and whether a run fits the cluster's GPUs."""

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.load import load_section
from rlpipe.config.root import Config
from rlpipe.shared.errors import ConfigError, ResourceError
from rlpipe.shared.project_files import CLUSTERS

_PATH = re.compile(r"[~/][\w./~-]+")  # a string that YAML reads as itself


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


def settings_of(cluster: ClusterConfig) -> list[str]:
    """The cluster's settings of runs, as overrides."""
    return _as_overrides(cluster.settings)


def check_gpus(config: Config, cluster: ClusterConfig, name: str) -> None:
    """Raises ResourceError when the run reserves more GPUs than the cluster has; a CPU cluster takes any run."""
    needed = config.needed_gpus
    if cluster.gpus and needed > cluster.gpus:
        raise ResourceError(
            f"the run needs {needed} GPUs ({config.actor.processes} for the actor, {config.rollout.engines} engines of "
            f"{config.rollout.engine.tensor_parallel}), but cluster {name!r} has {cluster.gpus}: "
            f"set nodes in its file to {-(-needed // cluster.node.gpus)}, or lower actor.processes or rollout.engines"
        )


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
