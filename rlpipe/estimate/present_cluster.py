"""This machine as a cluster file would describe it, for decisions that depend on what is there."""

import os
import subprocess
from pathlib import Path
from typing import Any, Literal

import psutil

from rlpipe.config.cluster import ClusterConfig, NetworkConfig, NodeConfig, SpeedsConfig
from rlpipe.config.load import load_section
from rlpipe.estimate.gpu_generations import engine_attention, generation_of
from rlpipe.shared.errors import ResourceError
from rlpipe.shared.project_files import CLUSTERS

_SMI_SECONDS = 60.0
_LIMIT_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class _KnownNode(ClusterConfig):
    """A file in configs/clusters/nodes, which leaves out how jobs get there."""

    kind: Literal["local"] = "local"


def present_cluster() -> ClusterConfig:
    """GPUs that this process may see, its cores and memory; bandwidths of the file in configs/clusters/nodes that names
    the same GPU, or careful defaults."""
    gpus = visible_gpus()
    node: dict[str, Any] = {
        "gpus": len(gpus),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gigabytes": host_memory_bytes() / 1e9,
    }
    network, speeds = NetworkConfig(), SpeedsConfig()
    if gpus:
        name, size_bytes = gpus[0]
        node |= {"gpu": name, "gpu_memory_gigabytes": size_bytes / 1e9}
        known = _known_node(name)
        if known is not None:
            speed = known.node.gpu_memory_gigabytes_per_second
            node |= {"gpu_memory_gigabytes_per_second": speed}
            network, speeds = known.network, _speeds_here(known.speeds)
    return ClusterConfig(kind="local", node=NodeConfig.model_validate(node), network=network, speeds=speeds)


def _speeds_here(speeds: SpeedsConfig) -> SpeedsConfig:
    """Those of the engines' kernels that are installed."""
    generation = generation_of(visible_capability() or (0, 0))
    if generation is None or engine_attention(generation) != "triton":
        return speeds
    return speeds.model_copy(update={"attention_share_of_bandwidth": speeds.triton_attention_share_of_bandwidth})


def visible_gpus() -> list[tuple[str, int]]:
    """Name and memory in bytes of each GPU, as nvidia-smi tells them without taking memory on any."""
    rows = [line.rsplit(",", 1) for line in _ask_driver("name,memory.total")]
    return [(name.strip(), _bytes_of(mebibytes)) for name, mebibytes in rows]


def _bytes_of(mebibytes: str) -> int:
    """Where a GPU has no memory of its own, nvidia-smi says [N/A]."""
    return int(mebibytes) * 2**20 if mebibytes.strip().isdecimal() else host_memory_bytes()


def visible_capability() -> tuple[int, int] | None:
    """Compute capability of the first GPU that this process may see, likewise; None without one."""
    found = [line.strip().partition(".") for line in _ask_driver("compute_cap")]
    return (int(found[0][0]), int(found[0][2])) if found else None


def _ask_driver(fields: str) -> list[str]:
    """One line for each GPU; none where nvidia-smi is missing or fails. Raises ResourceError where it hangs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            [*query, *([f"--id={visible}"] if visible else [])], capture_output=True, text=True, timeout=_SMI_SECONDS
        )
    except OSError:
        return []
    except subprocess.TimeoutExpired:
        raise ResourceError(
            f"nvidia-smi has not answered for {_SMI_SECONDS:g} seconds: look at the GPUs' driver (dmesg), or hide them "
            "by CUDA_VISIBLE_DEVICES="
        ) from None
    return answer.stdout.splitlines() if answer.returncode == 0 else []


def host_memory_bytes() -> int:
    """What processes here may use: the machine's memory, or the limit of the container."""
    limits = [Path(file).read_text().strip() for file in _LIMIT_FILES if Path(file).exists()]
    return min([int(psutil.virtual_memory().total), *(int(limit) for limit in limits if limit.isdecimal())])


def _known_node(gpu: str) -> ClusterConfig | None:
    for file in sorted(CLUSTERS.glob("nodes/*.yaml")):
        known = load_section(_KnownNode, file)
        if known.node.gpu == gpu:
            return known
    return None
