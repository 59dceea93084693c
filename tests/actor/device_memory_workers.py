"""Trainers whose device memory is freed and brought back between steps; imports Megatron."""

from contextlib import nullcontext
from functools import partial
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
from actor.megatron_patches import offloaded_adam
from actor.streamed_adam import StreamedAdam
from actor.train_report import Resident
from actor.trainer import Trainer
from rlpipe.config.actor import ActorConfig
from rlpipe.estimate import memory
from rlpipe.shared.errors import ActorError, ResourceError

LEFT_BYTES = 300


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


def held_beside_engines(rank: int, count: int, path: Path) -> dict[str, tuple[list[bool], int, int]]:
    """While engines generate, by how much the actor may hold then: whether gradients lay in tensors whenever torch gave
    back what no tensor lay in, how many slots of optimizer states were to go, and how many went."""
    small = partial(StreamedAdam, chunk_elements=64)
    with pytest.MonkeyPatch.context() as patch, streamed_states():
        patch.setattr(offloaded_adam, "StreamedAdam", small)
        patch.setattr(memory, "FRAGMENTS_BYTES", 0)
        policy = trainer(path, count, optimizer=SCHEDULE)
        (adam,) = policy.optimizer.streamed
        adam.reserve(10**9)
        tensors = _mapped_bytes(policy) + adam.held_bytes
        quarter = sum(buffer.grad_data.nbytes for chunk in policy.chunks for buffer in chunk.buffers) // 4
        limits = {
            "everything": tensors + LEFT_BYTES,
            "all tensors": tensors,
            "all but three slots": tensors - 3 * adam.slot_bytes,
            "all but a quarter of gradients": tensors - quarter,
            "all but more": tensors - quarter - 1,
            "nothing": 0,
        }
        found = {name: _held_after_releases(policy, adam, limit) for name, limit in limits.items()}
        without_weights = _held_after_releases(policy, adam, 5 * adam.slot_bytes, kept="nothing")
        return found | {"five slots, and no weights": without_weights}


def _held_after_releases(
    policy: Trainer, adam: StreamedAdam, limit: int, kept: Resident = "weights"
) -> tuple[list[bool], int, int]:
    """Of an update that has left `LEFT_BYTES` in torch's cache."""
    policy.keep_resident("all")
    adam.reserve(10**9)
    slots, torch_holds = adam.slots, _TorchMemory(policy, adam)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "reserved_memory_bytes", torch_holds.reserved)
        patch.setattr(device_memory, "allocated_memory_bytes", torch_holds.allocated)
        patch.setattr(device_memory, "release_cached_memory", torch_holds.release)
        policy.memory.share_with_engines(limit)
        (staying,) = policy.memory.states_that_stay(policy.optimizer)
        policy.keep_resident("weights")  # engines take their weights
        policy.keep_resident(kept, limit)
    return torch_holds.gradients_there, slots - staying, slots - adam.slots


class _TorchMemory:
    """What torch's allocator would say on a GPU."""

    def __init__(self, policy: Trainer, adam: StreamedAdam) -> None:
        self._policy = policy
        self._adam = adam
        self._reserved = self.allocated() + LEFT_BYTES
        self.gradients_there: list[bool] = []

    def reserved(self) -> int:
        return self._reserved

    def release(self) -> None:
        self._reserved = self.allocated()
        gradients = [buffer.grad_data for chunk in self._policy.chunks for buffer in chunk.buffers]
        self.gradients_there.append(all(data.untyped_storage().nbytes() for data in gradients))

    def allocated(self) -> int:
        return _mapped_bytes(self._policy) + self._adam.held_bytes


def _mapped_bytes(policy: Trainer) -> int:
    buffers = [buffer for chunk in policy.chunks for buffer in chunk.buffers]
    return sum(data.untyped_storage().nbytes() for one in buffers for data in (one.param_data, one.grad_data))
