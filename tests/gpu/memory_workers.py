"""An actor's process that frees its device memory and takes it again; imports Megatron."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_bits import bits
from train_workers import trainer, whole_batch

from actor.device_memory import enough_device_memory
from actor.trainer import Trainer
from rlpipe.config.actor import ActorConfig
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.jit_monitor import JitMonitor
from rlpipe.shared.errors import ResourceError

SUPERVISED = AlgorithmConfig(loss="sft")


def free_and_return(rank: int, count: int, path: Path) -> dict[str, Any]:
    """Free bytes of the device while the trainer holds each part, and whether everything is as it was."""
    JitMonitor.install()  # with it all cores compile what Triton tunes, as in a run
    policy = trainer(path, dtype="bfloat16")
    policy.train_step([whole_batch()], SUPERVISED)
    before, logprobs = _bits(policy), policy.logprobs([whole_batch()], "policy")[0]
    free: dict[str, list[int]] = {}
    allocated: dict[str, list[int]] = {}
    for held in ("all", "weights", "nothing", "weights", "all"):
        policy.keep_resident(held, limit_bytes=0)
        free.setdefault(held, []).append(torch.cuda.mem_get_info()[0])
        allocated.setdefault(held, []).append(torch.cuda.memory_allocated())
    after = policy.logprobs([whole_batch()], "policy")[0]
    weights = (bits(before), bits(_bits(policy)))
    report = policy.train_step([whole_batch()], SUPERVISED)
    return {
        "free": free,
        "allocated": allocated,
        "parameters": sum(parameter.numel() for parameter in policy.policy[0].parameters()),
        "weights": weights,
        "logprobs": (bits(logprobs), bits(after)),
        "applied": report.applied,
    }


def _bits(policy: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().to("cpu", copy=True) for chunk in policy.policy for parameter in chunk.parameters()]


def short_of_memory(rank: int, count: int) -> str:
    """What is said where the device has no room."""
    with pytest.raises(ResourceError) as raised, enough_device_memory("train", ActorConfig(), lambda: 0):
        torch.empty(2**44, device="cuda")
    return str(raised.value)
