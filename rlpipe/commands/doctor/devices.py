"""GPUs and collectives, really tried, in processes of their own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from rlpipe.commands.doctor.check import Check, fail, ok, warn
from rlpipe.estimate.gpu_generations import support_line
from rlpipe.estimate.present_cluster import visible_capability

_SECONDS = 180
_SLOW_GIGABYTES_PER_SECOND = 20.0


def check_devices(gdn_backend: str) -> Iterator[Check]:
    """GPU and driver, the Gated DeltaNet backend on a small problem, an all-reduce over all devices."""
    yield ok("kernels", support_line(visible_capability()))
    yield _answer("device", "gpu", "check the driver with nvidia-smi, and that torch is a CUDA build")
    yield _answer("gated delta net", f"gdn {gdn_backend}", "set actor.gdn_backend to torch, or install what it names")
    yield _answer("all-reduce", "all_reduce", "check NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, and the network")


def _answer(name: str, arguments: str, fix: str) -> Check:
    command = [sys.executable, "-m", "rlpipe.commands.doctor.device_probe", *arguments.split()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return fail(name, f"no answer within {_SECONDS} seconds", fix)
    lines = (done.stdout.strip() or done.stderr.strip() or "nothing was printed").splitlines()
    if done.returncode:
        return fail(name, lines[-1], fix)
    answer: dict[str, Any] = json.loads(lines[-1])
    speed = answer.get("gigabytes_per_second")
    if speed is not None and answer["gpus"] and speed < _SLOW_GIGABYTES_PER_SECOND:
        return warn(name, answer["found"], "GPUs of one node should be joined by NVLink: see nvidia-smi topo -m")
    return ok(name, answer["found"])
