"""Trainers whose device memory is freed and brought back between steps; imports Megatron."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_workers import SCHEDULE, SUPERVISED, my_packs
from tensor_bits import bits
from train_workers import streamed_states, trainer

from actor import device_memory
from actor.checkpoint import Checkpointer
from actor.device_memory import enough_device_memory
from actor.hf.policy_folder import save_hf
from actor.trainer import Trainer
from rlpipe.config.actor import ActorConfig
from rlpipe.shared.errors import ActorError, ResourceError


def all_cases(rank: int, count: int, cases: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {name: freed_between_steps(rank, count, path, options) for name, (path, options) in cases.items()}


def freed_between_steps(rank: int, count: int, path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Three steps of two trainers, one of which gives everything back before each step and after it."""
    with streamed_states() if options.get("streamed") else nullcontext():
        plain, freed = (trainer(path, count, reference=True, optimizer=options["optimizer"], **options["actor"])
                        for _ in range(2))  # fmt: skip
    metrics: list[Any] = []
    weights = []
    for _ in range(3):
        before = _bits(freed)
        freed.keep_resident("nothing")
        left = _storage_bytes(freed)
        freed.keep_resident("weights")
        restored = _bits(freed)
        logprobs = [policy.logprobs(my_packs(policy), which) for policy in (plain, freed)
                    for which in ("policy", "reference")]  # fmt: skip
        freed.keep_resident("all")
        metrics.append([policy.train_step(my_packs(policy), SUPERVISED).metrics for policy in (plain, freed)])
        weights.append((before, restored))
    return {
        "left_bytes": left,
        "bits": weights,
        "metrics": metrics,
        "logprobs": (bits(logprobs[:2]), bits(logprobs[2:])),
        "final": (_bits(plain), _bits(freed)),
        "optimizer": (bits(_optimizer(plain)), bits(_optimizer(freed))),
    }


def refused_calls(rank: int, count: int, path: Path, folder: Path) -> dict[str, str]:
    """What each call says to an actor that holds too little, and whether it works when it holds enough."""
    policy = trainer(path, count, reference=True, optimizer=SCHEDULE)
    saver = Checkpointer(policy, keep=1)
    saver.save(folder, 1, {})
    policy.keep_resident("nothing")  # while the checkpoint is still being written
    saver.finish()
    calls = {
        "train": lambda: policy.train([my_packs(policy)], SUPERVISED),
        "logprobs": lambda: policy.logprobs(my_packs(policy), "policy"),
        "set_reference": policy.set_reference,
        "reset_optimizer": lambda: policy.reset_optimizer(SCHEDULE, 3),
        "save": lambda: saver.save(folder, 2, {}),
        "load": lambda: saver.load(folder / "iteration_00000001"),
        "save_hf": lambda: save_hf(policy.policy, policy.description, folder / "hf", path),
    }
    found = {f"nothing {name}": _error(call) for name, call in calls.items() if name != "save_hf"}
    policy.keep_resident("weights")
    found |= {f"weights {name}": _error(call) for name, call in calls.items()}
    saver.finish()
    policy.keep_resident("nothing")
    policy.keep_resident("all")
    return found | {"all train": _error(calls["train"])}


def _error(call: Any) -> str:
    try:
        call()
    except ActorError as error:
        return str(error)
    return ""


def _bits(policy: Trainer) -> list[bytes]:
    return [p.detach().float().clone().numpy().tobytes() for chunk in policy.policy for p in chunk.parameters()]


def _storage_bytes(policy: Trainer) -> int:
    tensors = [p for chunk in policy.policy for p in chunk.parameters()]
    tensors += [p.main_grad for p in tensors if p.requires_grad]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _optimizer(policy: Trainer) -> list[torch.Tensor]:
    return [
        value
        for part in policy.optimizer.megatron.chained_optimizers
        if part.optimizer is not None
        for state in part.optimizer.state.values()
        for value in state.values()
    ]


def short_of_memory(rank: int, count: int) -> str:
    """What is said where torch finds no room."""
    actor = ActorConfig(max_tokens_per_gpu=16896)
    with pytest.raises(ResourceError) as raised, enough_device_memory("train on rank 3", actor, lambda: 38_400_000_000):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 620.00 MiB.\nSee the documentation")
    return str(raised.value)


def held_beside_engines(rank: int, count: int, path: Path) -> tuple[int, dict[str, list[int]]]:
    """Bytes of gradients; and where the actor may hold everything, weights and gradients, or nothing: what torch held,
    less weights and gradients, whenever it had given back what no tensor lies in. At first that is 300 bytes more."""
    policy = trainer(path, count, optimizer=SCHEDULE)
    tensors = _mapped_bytes(policy)
    limits = {"everything": tensors + 300, "weights and gradients": tensors + 200, "nothing": 0}
    gradients = sum(buffer.grad_data.nbytes for chunk in policy.chunks for buffer in chunk.buffers)
    return gradients, {name: _held_after_releases(policy, tensors, limit) for name, limit in limits.items()}


def _held_after_releases(policy: Trainer, tensors: int, limit: int) -> list[int]:
    found: list[int] = []
    reserved = tensors + 300

    def release() -> None:
        nonlocal reserved
        reserved = _mapped_bytes(policy)
        found.append(reserved - tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "reserved_memory_bytes", lambda: reserved)
        patch.setattr(device_memory, "release_cached_memory", release)
        policy.memory.share_with_engines(limit)
        policy.keep_resident("weights")  # engines take their weights
        policy.keep_resident("weights", limit)
        policy.keep_resident("all")
    return found


def _mapped_bytes(policy: Trainer) -> int:
    buffers = [buffer for chunk in policy.chunks for buffer in chunk.buffers]
    return sum(data.untyped_storage().nbytes() for one in buffers for data in (one.param_data, one.grad_data))
