"""What senders and receivers of weights agree on: where they meet and the plan of buckets.

The plan is made once by the actor and given to both sides, so an update needs no conversation through the driver: the
buckets have one order for all senders and all engines, and the version is set after the last.
"""

import math
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer


BUFFERS = "shared_buffers"
"""The `backend` of a group whose processes share memory instead of sending."""


JOIN_SECONDS = 60.0
"""A group whose processes have not met after so long lacks one of them."""


WeightContent = Literal["merged", "model_and_adapters", "adapters"]
"""What an update sends: one model, with adapters merged into its weights where there are any; the model as it is and
its adapters beside it; or these alone, to engines that hold the model."""


ADAPTER_ROOT = "base_model.model."
"""Before the names of adapters' factors, which are PEFT's; no weight of a model is called so."""


SCALE = "_scale_inv"
"""After the name of a weight in 8 bits: its scales."""

_ALIGNMENT_BYTES = 16
"""Kernels read and write as much at a time."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class EngineAdapter:
    """An adapter for which an engine keeps room beside the weights: it adds `scale x b @ a` to projections, each with a
    pair of factors of inner width `rank`.

    modules: the last parts of the projections' Hugging Face names.
    """

    rank: int
    scale: float
    modules: tuple[str, ...]


@dataclass(frozen=True)
class WeightGroup:
    """Where an update's processes meet.

    backend: of torch.distributed, for a process group of each sender in which it is rank 0 and all of the engines'
        processes are the others; or BUFFERS, for one engine and the actor's processes on its devices, each of which
        shares memory with the engine's process there.
    addresses, port: of a store that the actor holds, in which each process group meets under its name; with BUFFERS
        `port` has no meaning and there is an address for each tensor-parallel rank of the engine, at which a process of
        the actor listens (rlpipe.shared.weight_channel).
    senders: global ranks of the actor's processes. readers: how many processes the engines have in all.
    in_flight_bytes: what a reader may have under way at a time; a larger bucket comes alone.
    key: of the gate before the store, if it has one (rlpipe.shared.guarded_port).
    """

    name: str
    addresses: tuple[str, ...]
    port: int
    senders: tuple[int, ...]
    readers: int
    backend: str
    in_flight_bytes: int = 0
    key: bytes = field(default=b"", repr=False)

    def name_of(self, sender: int) -> str:
        """Of the process group in which `sender` sends."""
        return f"{self.name}-{sender}"

    def address_of(self, reader: int) -> str:
        """Where tensor-parallel rank `reader` of an engine meets its sender."""
        return self.addresses[reader if self.backend == BUFFERS else 0]


@dataclass(frozen=True)
class SharedBuffer:
    """A buffer of bytes that another process of the same machine can open.

    handle: of kind `cuda_ipc` torch's pickled reference to device memory, of kind `memory_file` the path of a file in
        memory.
    """

    kind: Literal["cuda_ipc", "memory_file"]
    handle: bytes
    size_bytes: int


@dataclass(frozen=True)
class TensorSpec:
    """One tensor under its Hugging Face name. `dtype` is torch's name without the module, for instance "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * _ITEM_BYTES[self.dtype]

    @property
    def is_scale(self) -> bool:
        """Whether these are the scales of the tensor before it."""
        return self.name.endswith(SCALE)


@dataclass(frozen=True)
class WeightBucket:
    """Tensors that travel as bytes, in one piece.

    sender: global rank of the actor's process that broadcasts it. Where memory is shared every process hands over all
        buckets, and this means nothing.
    """

    tensors: tuple[TensorSpec, ...]
    sender: int = 0

    @cached_property
    def size_bytes(self) -> int:
        """With the gaps that alignment asks for."""
        return packed_bytes(self.tensors)

    @property
    def has_gaps(self) -> bool:
        return self.size_bytes > sum(spec.size_bytes for spec in self.tensors)

    @property
    def holds_adapters(self) -> bool:
        """Whether these are factors of adapters; none holds both factors and weights."""
        return is_factor(self.tensors[0].name)

    def pieces(self, flat: "torch.Tensor") -> "list[torch.Tensor]":
        """Each of its tensors, where it lies in `flat`, uint8 [size_bytes]."""
        import torch

        ends = accumulate(self.tensors, _end_after, initial=0)
        return [
            flat[aligned(end) :][: spec.size_bytes].view(getattr(torch, spec.dtype)).view(spec.shape)
            for end, spec in zip(ends, self.tensors, strict=False)
        ]


_EXPERTS = re.compile(r"(.*\.experts)\.(?:(\d+)-(\d+)\.)?(gate_up_proj|down_proj)(|_scale_inv)")


@dataclass(frozen=True)
class StackedExperts:
    """Which of a layer's experts a stacked tensor [experts, rows, columns] holds, as its name tells: all of them in
    `experts.down_proj`, those from 64 to 127 in `experts.64-127.down_proj`.

    root: the name up to "experts". ending: "_scale_inv" for the scales of numbers in 8 bits.
    """

    root: str
    first: int
    kind: str
    ending: str = ""

    @classmethod
    def of_name(cls, name: str) -> "StackedExperts | None":
        """None for any other tensor."""
        found = _EXPERTS.fullmatch(name)
        return None if found is None else cls(found[1], int(found[2] or 0), found[4], found[5])


def packed_bytes(tensors: Iterable[TensorSpec]) -> int:
    """What tensors take that lie one after another, each at an aligned place."""
    *_, end = accumulate(tensors, _end_after, initial=0)
    return end


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _end_after(end: int, spec: TensorSpec) -> int:
    return aligned(end) + spec.size_bytes


def experts_part(name: str, first: int, last: int) -> str:
    """The name of experts `first` to `last` of a stacked tensor."""
    root, _, kind = name.rpartition(".")
    return f"{root}.{first}-{last}.{kind}"


def is_factor(name: str) -> bool:
    """Whether a tensor of an update is one of an adapter's factors."""
    return name.startswith(ADAPTER_ROOT)


def checksum(data: "Buffer") -> str:
    """CRC-32 of the bytes of a flattened bucket, as 8 hexadecimal digits; sender and receivers compare it."""
    return f"{zlib.crc32(data):08x}"
