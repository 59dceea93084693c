"""What the evidence of a policy depends on, as it is here."""

import re
from pathlib import Path

import torch

from actor.comm_guard.rules import Stack

_DRIVER = Path("/proc/driver/nvidia/version")


def present_stack() -> Stack:
    """The stack of the present CUDA device."""
    return Stack(
        device=torch.cuda.get_device_name(),
        driver=driver_version(_DRIVER.read_text() if _DRIVER.exists() else ""),
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        torch=torch.__version__,
    )


def driver_version(text: str) -> str:
    """From what the kernel module says about itself; `unknown` where that is hidden."""
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return found.group() if found else "unknown"
