"""Adam on the device over states that live in host memory, chunk by chunk.

Masters and moments of all trained parameters lie one behind the other in page-locked host memory. A chunk of them is
uploaded into a slot of device memory, updated there, and downloaded again. There are as many slots as device memory
has room for, none where it has none: what fits is uploaded while forward and backward passes run, and a chunk that
stays in its slot is not uploaded again for the next update. An update itself, whose passes are over, has two at least.
Downloads run beside whatever the device does after an update.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actor.adam import update_in_place
from actor.host_memory import HostMemory
from actor.transfer_stream import (
    Event,
    TransferStream,
    compute_after,
    record_compute,
    wait_on_host,
)
from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "torch._C._VariableFunctions:_foreach_copy_",
    why="one launch for many small tensors",
    drop_when="torch names it without an underscore",
)

CHUNK_ELEMENTS = 64 * 2**20
LEAST_SLOTS = 2
"""Of an update: one chunk is updated while the next one arrives."""


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of one trained parameter: `parameter` [n] on the device, from `start` of its chunk on."""

    parameter: Tensor
    owner: Tensor
    owner_start: int
    start: int


@dataclass(frozen=True)
class Chunk:
    """Consecutive elements of the host states, all of one parameter group."""

    number: int
    group: int
    start: int
    elements: int
    pieces: tuple[Piece, ...]


class HostStates:
    """Masters in float32 and both moments in `moments_dtype`, of `elements` parameters, in host memory."""

    def __init__(self, elements: int, moments_dtype: torch.dtype, memory: HostMemory) -> None:
        self.master = memory.zeros(elements, torch.float32)
        self.exp_avg = memory.zeros(elements, moments_dtype)
        self.exp_avg_sq = memory.zeros(elements, moments_dtype)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.master, self.exp_avg, self.exp_avg_sq


class _Slot:
    """Device memory for the states of one chunk."""

    def __init__(self, elements: int, states: HostStates, device: torch.device) -> None:
        self.parts = tuple(torch.empty(elements, dtype=part.dtype, device=device) for part in states.parts)
        self.master_arrived: Event = None
        self.arrived: Event = None
        self.computed: Event = record_compute()
        self.downloaded: Event = None
        self.ahead = False
        """Whether the host's states are those of an earlier update."""


class StreamedAdam:
    """Updates parameters on the device. `groups[g]` lists the trained parameters of group g, each [n] and contiguous.

    What the host holds is up to date only after `finish`.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        moments_dtype: torch.dtype,
        chunk_elements: int = CHUNK_ELEMENTS,
        memory: HostMemory | None = None,
    ) -> None:
        self._chunks = tuple(_chunks(groups, chunk_elements))
        self._ranges = _ranges(groups)
        self.elements = sum(chunk.elements for chunk in self._chunks)
        self.states = HostStates(self.elements, moments_dtype, memory or HostMemory())
        self._device = next(parameter.device for group in groups for parameter in group)
        self._slot_elements = max(chunk.elements for chunk in self._chunks)
        self._free: list[_Slot] = []
        self._held: dict[int, _Slot] = {}
        self._upload, self._download = TransferStream(), TransferStream()
        self.staying_slots = 0
        """How many slots keep what they hold after the next update; they are downloaded only where that is needed."""

    @property
    def slot_bytes(self) -> int:
        return self._slot_elements * sum(part.dtype.itemsize for part in self.states.parts)

    @property
    def slots(self) -> int:
        return len(self._free) + len(self._held)

    @property
    def held_bytes(self) -> int:
        """Device memory of all slots."""
        return self.slots * self.slot_bytes

    def host_views(self, parameter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Master and both moments of one of the parameters, as views of the host's states."""
        start = self._ranges[parameter]
        return tuple(part[start : start + parameter.numel()] for part in self.states.parts)  # type: ignore[return-value]

    def reserve(self, slots: int) -> None:
        """Have `slots` slots, or one for each chunk if that is less; fewer than wanted where the device has no room.
        What slots held stays there as far as they remain."""
        self.release(slots)
        self._grow(slots, least=0)

    def prefetch(self) -> None:
        """Begin to upload what has a slot."""
        for chunk in self._chunks:
            if chunk.number in self._held:
                continue
            if not self._free:
                return
            self._upload_into(self._free.pop(), chunk)

    def step(
        self, applied_steps: int, groups: Sequence[dict[str, Any]], gradient_of: Callable[[Tensor], Tensor]
    ) -> None:
        """One update, after `applied_steps` earlier ones. groups: learning rates and the like, as in torch's AdamW.

        gradient_of: the gradient of a parameter, of any shape and dtype, on the device.
        """
        self._grow(LEAST_SLOTS, least=LEAST_SLOTS)
        self.prefetch()
        held = [chunk for chunk in self._chunks if chunk.number in self._held]
        waiting = [chunk for chunk in self._chunks if chunk.number not in self._held]
        gradient = torch.empty(self._slot_elements, dtype=torch.float32, device=self._device)
        for position, chunk in enumerate([*held, *waiting]):
            slot = self._held[chunk.number] = self._held.pop(chunk.number)  # now the newest, which is released last
            self._update(chunk, slot, applied_steps, groups[chunk.group], gradient, gradient_of)
            if position < len(self._chunks) - self.staying_slots:
                self._download_from(slot, chunk)
            if position < len(waiting):
                del self._held[chunk.number]
                self._upload_into(slot, waiting[position])

    def restore_parameters(self) -> None:
        """Write all parameters anew from their masters, which is what the last update did. Begins to upload moments."""
        missing = [chunk for chunk in self._chunks if chunk.number not in self._held]
        if missing and not self._free:
            self._grow(self.slots + LEAST_SLOTS, least=self.slots + 1)
        for chunk in self._chunks:
            if chunk.number in self._held:
                compute_after(self._held[chunk.number].master_arrived)
                _write(chunk, self._held[chunk.number].parts[0])
        # Backwards, so that what comes first in an update stays in a slot.
        slots = self._free
        for position in reversed(range(len(missing))):
            chunk, slot = missing[position], slots[position % len(slots)]
            self._copy_up(slot, chunk, masters_only=True)
            compute_after(slot.master_arrived)
            _write(chunk, slot.parts[0])
            slot.computed = record_compute()
        self._free = []
        for chunk, slot in zip(missing, slots, strict=False):
            self._copy_up(slot, chunk, moments_only=True)
            self._held[chunk.number] = slot

    def finish(self) -> None:
        """Returns once the host has what the last update left."""
        for chunk in self._chunks:
            if chunk.number in self._held and self._held[chunk.number].ahead:
                self._download_from(self._held[chunk.number], chunk)
        for slot in self._held.values():
            wait_on_host(slot.downloaded)
        wait_on_host(self._download.record())

    def release(self, slots: int = 0) -> None:
        """Keep at most `slots` slots. Waits for downloads from the others."""
        leaving = max(0, len(self._held) - slots)
        for number in list(self._held)[:leaving]:
            if self._held[number].ahead:
                self._download_from(self._held[number], self._chunks[number])
        while self.slots > slots:
            slot = self._free.pop() if self._free else self._held.pop(next(iter(self._held)))
            wait_on_host(slot.downloaded)
            wait_on_host(slot.arrived)

    def close(self) -> None:
        """Give all device memory back; the host's goes with the last reference to its states."""
        self.finish()
        self.release()

    def forget(self) -> None:
        """The host's states were changed from outside: nothing that slots hold is valid any more."""
        for slot in self._held.values():
            slot.ahead = False
        self._free += self._held.values()
        self._held = {}

    def _grow(self, slots: int, least: int) -> None:
        """Have `slots` slots, or one for each chunk if that is less. Raises OutOfMemoryError where the device has no
        room for `least` of them."""
        while self.slots < min(slots, len(self._chunks)):
            try:
                self._free.append(_Slot(self._slot_elements, self.states, self._device))
            except torch.OutOfMemoryError:
                if self.slots < least:
                    raise
                return

    def _upload_into(self, slot: _Slot, chunk: Chunk) -> None:
        self._copy_up(slot, chunk)
        self._held[chunk.number] = slot

    def _copy_up(self, slot: _Slot, chunk: Chunk, masters_only: bool = False, moments_only: bool = False) -> None:
        if not moments_only:
            self._upload.after(slot.computed)
        self._upload.after(slot.downloaded)
        with self._upload.working():
            for index, (host, device) in enumerate(zip(self.states.parts, slot.parts, strict=True)):
                if masters_only and index > 0 or moments_only and index == 0:
                    continue
                device[: chunk.elements].copy_(_of(host, chunk), non_blocking=True)
                if index == 0:
                    slot.master_arrived = self._upload.record()
        slot.arrived = self._upload.record()

    def _update(
        self,
        chunk: Chunk,
        slot: _Slot,
        applied_steps: int,
        group: dict[str, Any],
        gradient: Tensor,
        gradient_of: Callable[[Tensor], Tensor],
    ) -> None:
        gradient = gradient[: chunk.elements]
        for piece in chunk.pieces:
            values = gradient_of(piece.owner).flatten()[piece.owner_start : piece.owner_start + piece.parameter.numel()]
            gradient[piece.start : piece.start + values.numel()].copy_(values)
        compute_after(slot.arrived)
        compute_after(slot.downloaded)
        master, exp_avg, exp_avg_sq = (part[: chunk.elements] for part in slot.parts)
        step = torch.full((), float(applied_steps), device=self._device)
        update_in_place(master, gradient, exp_avg, exp_avg_sq, step, group)
        _write(chunk, master)
        slot.computed = record_compute()
        slot.ahead = True

    def _download_from(self, slot: _Slot, chunk: Chunk) -> None:
        self._download.after(slot.computed)
        with self._download.working():
            for host, device in zip(self.states.parts, slot.parts, strict=True):
                _of(host, chunk).copy_(device[: chunk.elements], non_blocking=True)
        slot.downloaded = self._download.record()
        slot.ahead = False


def _write(chunk: Chunk, master: Tensor) -> None:
    """Round the masters of `chunk` to its parameters."""
    torch._foreach_copy_(
        [piece.parameter for piece in chunk.pieces],
        [master[piece.start : piece.start + piece.parameter.numel()] for piece in chunk.pieces],
    )


def _of(host: Tensor, chunk: Chunk) -> Tensor:
    return host[chunk.start : chunk.start + chunk.elements]


def _ranges(groups: Sequence[Sequence[Tensor]]) -> dict[Tensor, int]:
    """Where each parameter begins in the host's states."""
    ranges, start = {}, 0
    for group in groups:
        for parameter in group:
            ranges[parameter] = start
            start += parameter.numel()
    return ranges


def _chunks(groups: Sequence[Sequence[Tensor]], chunk_elements: int) -> Iterator[Chunk]:
    """Consecutive chunks of at most `chunk_elements`; none spans two groups, which have settings of their own."""
    number = start = 0
    for group, parameters in enumerate(groups):
        pieces: list[Piece] = []
        elements = 0
        for owner in parameters:
            flat, taken = owner.detach().view(-1), 0
            while taken < flat.numel():
                count = min(flat.numel() - taken, chunk_elements - elements)
                pieces.append(Piece(flat[taken : taken + count], owner, taken, elements))
                taken, elements = taken + count, elements + count
                if elements == chunk_elements:
                    yield Chunk(number, group, start, elements, tuple(pieces))
                    number, start, pieces, elements = number + 1, start + elements, [], 0
        if elements:
            yield Chunk(number, group, start, elements, tuple(pieces))
            number, start = number + 1, start + elements
