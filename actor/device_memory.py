"""What of the policy is in device memory: gives it back while engines use the same GPU, and brings it back bit by bit.

Masters in host memory hold every trained parameter in float32, so freeing parameters copies nothing out: they are
rounded to the parameters' dtype again, which is what the optimizer does after each step. Only what has no master in
host memory (frozen parameters, and the part of the optimizer that lives on the device) is copied there and back.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Thread
from typing import Any, TypeAlias

import torch

from actor.device import (
    allocated_memory_bytes,
    free_memory_bytes,
    has_own_memory,
    release_cached_memory,
    reserved_memory_bytes,
    synchronize_compute,
)
from actor.host_memory import HostCopies
from actor.optimizer import Optimizer
from actor.train_report import Resident
from rlpipe.config.actor import ActorConfig
from rlpipe.estimate.memory import STATES_RESERVE_BYTES, states_room_bytes
from rlpipe.shared.errors import ActorError, ResourceError

Part: TypeAlias = Callable[[str], AbstractContextManager[None]]

_LEVELS: tuple[Resident, ...] = ("nothing", "weights", "all")


@contextmanager
def enough_device_memory(call: str, actor: ActorConfig, state_bytes: Callable[[], int]) -> Iterator[None]:
    """Raises ResourceError where `call` finds no room. state_bytes: of the optimizer, on the device at that time."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        used, limit = allocated_memory_bytes(), actor.optimizer.device_cache_gigabytes
        raise ResourceError(
            f"{call} ran out of device memory beside {used / 1e9:.1f} GB of the actor's tensors, "
            f"{state_bytes() / 1e9:.1f} of them optimizer states: lower actor.max_tokens_per_gpu "
            f"({actor.pack_tokens:,}) or actor.optimizer.device_cache_gigabytes "
            f"({'as there is room' if limit is None else limit}), or set actor.recompute.granularity to full "
            f"({str(error).splitlines()[0]})"
        ) from error


class DeviceMemory:
    """What of the policy is on the device: nothing, the weights, or (all) weights and gradients.

    Tensors keep their identity and views: their storages shrink to size 0 and grow again.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], part: Part = lambda _: nullcontext()) -> None:
        """chunks: wrapped for data parallelism by Megatron; part: measures a named step."""
        self._chunks = list(chunks)
        self._part = part
        self._limit_bytes: int | None = None
        self._releasing: Thread | None = None
        self.pass_bytes: int | None = None
        """What forward and backward passes take beyond weights and gradients; None until that was measured."""
        self._gradients = _Storages()
        self._weights = _Storages()
        self._host = HostCopies()
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

    def stage_states(self, optimizer: Optimizer) -> None:
        """Begin to upload optimizer states for the next update, as far as the passes before it leave room."""
        self._finish_release()
        self._reserve_for_states(optimizer)
        for adam in optimizer.streamed:
            adam.prefetch()

    def states_that_stay(self, optimizer: Optimizer) -> list[int]:
        """Of each streamed half of the optimizer, for how many of its slots there is room while engines generate."""
        if self._limit_bytes is None:  # the device is the actor's own
            return [adam.slots for adam in optimizer.streamed]
        room, _ = self._states_beside_engines(self._limit_bytes, optimizer)
        found = []
        for adam in optimizer.streamed:
            found.append(min(adam.slots, max(0, room) // adam.slot_bytes))
            room -= found[-1] * adam.slot_bytes
        return found

    def keep_resident(self, wanted: Resident, optimizer: Optimizer, limit_bytes: int | None = None) -> None:
        """Free or bring back what `wanted` says. Collective: weights come back by an all-gather.

        limit_bytes: how much device memory this process may hold until the next call, if that is limited at all; states
        of the optimizer stay there as far as that allows.
        """
        self._finish_release()
        if wanted != "all":
            with self._part("offload_gradients"):
                self._make_room_for_gradients(optimizer)
                self._gradients.free(buffer.grad_data for buffer in self._buffers())
        if wanted == "nothing" and not self._weights.freed:
            with self._part("offload_weights"):
                self._free_weights(optimizer)
        elif wanted != "nothing" and self._weights.freed:
            with self._part("onload_map_weights"):
                self._weights.restore()
                if wanted == "all":
                    self._gradients.restore()
                    self._reserve_for_states(optimizer)
            self._fill_weights(optimizer)
        if wanted == "all":
            with self._part("onload_gradients"):
                self._gradients.restore()
        elif limit_bytes is not None:
            with self._part("offload_release"):
                self._hold_at_most(limit_bytes, optimizer)
        self.resident = wanted

    def share_with_engines(self, limit_bytes: int) -> None:
        """While engines generate, this process may hold `limit_bytes` of the device."""
        self._limit_bytes = limit_bytes

    def release_activations(self) -> None:
        """Begin to give what torch keeps of the passes back to the device, beside the optimizer's step, where engines
        need it. Unmapping tens of gigabytes takes the driver a good part of a second."""
        if self._limit_bytes is not None and self._releasing is None and reserved_memory_bytes() > self._limit_bytes:
            self._releasing = Thread(target=release_cached_memory, name="release-activations")
            self._releasing.start()

    def _make_room_for_gradients(self, optimizer: Optimizer) -> None:
        """Where not all has room beside engines, what the optimizer's step has left goes before torch keeps the memory
        of gradients with it, and as many states as have to: gradients are tens of gigabytes, which may have room
        without, and would be mapped anew."""
        if self._limit_bytes is None or self._gradients.freed or reserved_memory_bytes() <= self._limit_bytes:
            return
        states, gradients_stay = self._states_beside_engines(self._limit_bytes, optimizer)
        if gradients_stay:
            self._keep_states(states, optimizer)
        synchronize_compute()
        release_cached_memory()

    def _states_beside_engines(self, limit_bytes: int, optimizer: Optimizer) -> tuple[int, bool]:
        """Bytes of states that may stay while engines generate; and whether the memory of gradients, which are there
        now, stays mapped beside them."""
        storages = {buffer.grad_data.untyped_storage() for buffer in self._buffers()}
        gradients = sum(storage.nbytes() for storage in storages)
        room = _room_for_states(limit_bytes, optimizer) + gradients
        states = int(states_room_bytes(room, gradients, _state_bytes(optimizer)))
        return states, states < room

    def _keep_states(self, room: int, optimizer: Optimizer) -> None:
        """As many as `room` holds; the others are in host memory then."""
        for adam in optimizer.streamed:
            adam.release(max(0, room) // adam.slot_bytes)
            room -= adam.held_bytes

    def _finish_release(self) -> None:
        releasing, self._releasing = self._releasing, None
        if releasing is not None:
            with self._part("offload_release"):
                releasing.join()

    def _hold_at_most(self, limit_bytes: int, optimizer: Optimizer) -> None:
        self._keep_states(_room_for_states(limit_bytes, optimizer), optimizer)
        if reserved_memory_bytes() > limit_bytes:
            synchronize_compute()
            release_cached_memory()

    def _reserve_for_states(self, optimizer: Optimizer) -> None:
        room = 0
        if has_own_memory() and self.pass_bytes is not None:
            free = free_memory_bytes() + reserved_memory_bytes() - allocated_memory_bytes()
            room = max(0, free + _state_bytes(optimizer) - self.pass_bytes - STATES_RESERVE_BYTES)
        limit = optimizer.options.device_cache_gigabytes
        room = room if limit is None else min(room, int(limit * 1e9))
        for adam in optimizer.streamed:
            adam.reserve(max(0, room) // adam.slot_bytes)
            room -= adam.held_bytes

    def _free_weights(self, optimizer: Optimizer) -> None:
        self._masters, alone = _trained_shards(optimizer)
        alone += [p for chunk in self._chunks for p in chunk.parameters() if not p.requires_grad]
        self._copies = list(zip(alone, self._host.like(alone), strict=True))
        with torch.no_grad():
            for tensor, copy in self._copies:
                copy.copy_(tensor, non_blocking=True)
        synchronize_compute()
        self._weights.free([*(buffer.param_data for buffer in self._buffers()), *alone])

    def _fill_weights(self, optimizer: Optimizer) -> None:
        with self._part("onload_copy_weights"), torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy, non_blocking=True)
            for shard, master in self._masters:
                shard.copy_(master)
            for adam in optimizer.streamed:
                adam.restore_parameters()
            synchronize_compute()
        self._copies, self._masters = [], []
        self._host.give_back()
        with self._part("onload_gather_weights"):
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)  # type: ignore[operator]
            synchronize_compute()

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


def _state_bytes(optimizer: Optimizer) -> int:
    """Device memory that optimizer states take."""
    return sum(adam.held_bytes for adam in optimizer.streamed)


def _room_for_states(limit_bytes: int, optimizer: Optimizer) -> int:
    """Of `limit_bytes`, what all tensors but optimizer states leave."""
    return limit_bytes - (allocated_memory_bytes() - _state_bytes(optimizer))


def _trained_shards(optimizer: Optimizer) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """This rank's shards of trained parameters: pairs of (shard, its master) where the master is elsewhere and no
    StreamedAdam brings it back; and all tensors on the device that nothing else holds: shards that are their own
    master, masters and moments there."""
    pairs, alone = [], []
    for hybrid in optimizer.adams:
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
                and not (hybrid.streamed and shard in hybrid.gpu_params_map_cpu_copy)
            ]
    return pairs, alone


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [] if optimizer is None else optimizer.param_groups
