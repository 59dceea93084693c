"""Gives device memory back while engines use the same GPU, and brings the policy back bit by bit.

Masters in host memory hold every trained parameter in float32, so freeing parameters copies nothing out: they are
rounded to the parameters' dtype again, which is what the optimizer does after each step. Only what has no master in
host memory (frozen parameters, and the part of the optimizer that lives on the device) is copied there and back.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Thread
from typing import Any, TypeAlias

import torch

from actor.device import host_buffer_like, release_cached_memory, synchronize
from actor.optimizer import Optimizer
from actor.train_report import Resident
from rlpipe.shared.errors import ActorError

Part: TypeAlias = Callable[[str], AbstractContextManager[None]]

_LEVELS: tuple[Resident, ...] = ("nothing", "weights", "all")


class DeviceMemory:
    """What of the policy is on the device: nothing, the weights, or (all) weights and gradients.

    Tensors keep their identity and views: their storages shrink to size 0 and grow again.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], part: Part = lambda _: nullcontext()) -> None:
        """chunks: wrapped for data parallelism by Megatron; part: measures a named step."""
        self._chunks = list(chunks)
        self._part = part
        self._shared = False
        self._releasing: Thread | None = None
        self._gradients = _Storages()
        self._weights = _Storages()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._masters: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.resident: Resident = "all"

    def require(self, needed: Resident, call: str) -> None:
        """Raises ActorError where `call` needs more than is on the device."""
        self._finish_release()
        if _LEVELS.index(self.resident) < _LEVELS.index(needed):
            raise ActorError(
                f"{call} needs the actor's {'weights and gradients' if needed == 'all' else 'weights'} on the device, "
                f"where it holds {'only its weights' if self.resident == 'weights' else 'nothing'}: call "
                f"ActorGroup.keep_resident({needed!r}) first"
            )

    def keep_resident(self, wanted: Resident, optimizer: Optimizer) -> None:
        """Free or bring back what `wanted` says. Collective: weights come back by an all-gather."""
        self._shared = True
        self._finish_release()
        if wanted != "all":
            with self._part("offload_gradients"):
                self._gradients.free(buffer.grad_data for buffer in self._buffers())
        if wanted == "nothing" and not self._weights.freed:
            with self._part("offload_weights"):
                self._free_weights(optimizer)
        elif wanted != "nothing" and self._weights.freed:
            self._restore_weights()
        if wanted == "all":
            with self._part("onload_gradients"):
                self._gradients.restore()
        else:
            with self._part("offload_release"):
                synchronize()
                release_cached_memory()
        self.resident = wanted

    def release_activations(self) -> None:
        """Begin to give what torch keeps of the passes back to the device, beside the optimizer's work on the host,
        where the device is shared. Unmapping tens of gigabytes takes the driver a good part of a second."""
        if self._shared and self._releasing is None:
            self._releasing = Thread(target=release_cached_memory, name="release-activations")
            self._releasing.start()

    def _finish_release(self) -> None:
        releasing, self._releasing = self._releasing, None
        if releasing is not None:
            with self._part("offload_release"):
                releasing.join()

    def _free_weights(self, optimizer: Optimizer) -> None:
        self._masters, alone = _trained_shards(optimizer)
        alone += [p for chunk in self._chunks for p in chunk.parameters() if not p.requires_grad]
        self._copies = [(tensor, host_buffer_like(tensor)) for tensor in alone]
        with torch.no_grad():
            for tensor, copy in self._copies:
                copy.copy_(tensor, non_blocking=True)
        synchronize()
        self._weights.free([*(buffer.param_data for buffer in self._buffers()), *alone])

    def _restore_weights(self) -> None:
        with self._part("onload_map_weights"):
            self._weights.restore()
        with self._part("onload_copy_weights"), torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy, non_blocking=True)
            for shard, master in self._masters:
                # Sent in float32 and rounded on the device: torch would otherwise round on the host first.
                shard.copy_(master.to(shard.device, non_blocking=True))
            synchronize()
        self._copies, self._masters = [], []
        with self._part("onload_gather_weights"):
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)  # type: ignore[operator]
            synchronize()

    def _buffers(self) -> Iterator[Any]:
        for chunk in self._chunks:
            yield from (*chunk.buffers, *chunk.expert_parallel_buffers)  # type: ignore[misc]


class _Storages:
    """Storages that are freed together and come back filled with zeros: what lies between parameters is never read,
    but travels with them."""

    def __init__(self) -> None:
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def freed(self) -> bool:
        return bool(self._sizes)

    def free(self, tensors: Iterable[torch.Tensor]) -> None:
        if self.freed:
            return
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._sizes = [(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]
        for storage, _ in self._sizes:
            storage.resize_(0)

    def restore(self) -> None:
        for storage, size in self._sizes:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        self._sizes = []


def _trained_shards(optimizer: Optimizer) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """This rank's shards of trained parameters: pairs of (shard, its master) where the master is elsewhere; and all
    tensors on the device that nothing else holds: shards that are their own master, masters and moments there."""
    pairs, alone = [], []
    for part in optimizer.megatron.chained_optimizers:
        hybrid = part.optimizer
        if hybrid is None:  # this rank trains nothing of the part
            continue
        on_device = [p for group in _groups(hybrid.gpu_optimizer) for p in group["params"]]
        for master in on_device:
            state = hybrid.gpu_optimizer.state[master]
            alone += [master.detach(), state["exp_avg"], state["exp_avg_sq"]]
            master.grad = None
        for group in hybrid.param_groups:
            shards = group["params"]
            pairs += [
                (shard.detach(), hybrid.param_to_inner_param[shard].detach())
                for shard in shards
                if hybrid.param_to_inner_param[shard] is not shard
            ]
    return pairs, alone


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [] if optimizer is None else optimizer.param_groups
