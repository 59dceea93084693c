"""What a node of a cluster is like, asked on that node."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

_SMI_SECONDS = 30
_HUB_SECONDS = 10
_FIELDS = "driver_version,name,compute_cap,memory.used"


@dataclass(frozen=True)
class Gpu:
    """As nvidia-smi tells it. compute_capability: for instance "9.0"; used_bytes: by whatever runs there."""

    driver: str
    name: str
    compute_capability: str
    used_bytes: int


@dataclass(frozen=True)
class NodeFacts:
    """One node. load: mean number of processes that wanted a core in the last minute. hub: empty where the Hugging Face
    hub answers, otherwise why not; None where nobody is to ask it. skew_seconds: its clock less the asking node's.
    reported_gpus: what Ray may use."""

    address: str
    versions: Mapping[str, str]
    gpus: tuple[Gpu, ...]
    cores: int
    load: float
    free_bytes: int
    memory_bytes: int
    hub: str | None
    skew_seconds: float = 0.0
    reported_gpus: float = 0.0


def node_facts(address: str, packages: tuple[str, ...]) -> NodeFacts:
    """Of the machine that this runs on. packages: whose versions are wanted."""
    import psutil

    from rlpipe.estimate.present_cluster import host_memory_bytes

    memory = psutil.virtual_memory()
    return NodeFacts(
        address=address,
        versions={"python": ".".join(map(str, sys.version_info[:3])), **_versions(packages)},
        gpus=read_gpus(),
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        free_bytes=memory.available,
        memory_bytes=host_memory_bytes(),
        hub=_hub_problem(),
    )


def clock() -> float:
    """Seconds of the node's wall clock."""
    return time.time()


def read_gpus() -> tuple[Gpu, ...]:
    """All GPUs of this machine, none where nvidia-smi is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    rows = [line.split(", ") for line in answer.stdout.splitlines()] if answer.returncode == 0 else []
    return tuple(Gpu(driver, name, capability, _bytes(used)) for driver, name, capability, used in rows)


def _bytes(mebibytes: str) -> int:
    """None where nvidia-smi does not know."""
    return int(mebibytes) * 2**20 if mebibytes.strip().isdecimal() else 0


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def _hub_problem() -> str | None:
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        httpx.head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except (httpx.HTTPError, OSError) as error:
        return f"{constants.ENDPOINT}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    return ""
