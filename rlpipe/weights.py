"""What senders and receivers of weights agree on: where they meet and the plan of buckets.

The plan is made once by the actor and given to both sides, so an update needs no conversation through the driver: the
buckets are sent in order, each engine receives them in order, and the version is set after the last.
"""

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from typing_extensions import Buffer


BUFFERS = "shared_buffers"
"""The `backend` of a group whose processes share memory instead of sending."""


@dataclass(frozen=True)
class WeightGroup:
    """Where an update's processes meet.

    backend: of torch.distributed, for a process group in which rank 0 broadcasts and ranks 1 to `world_size - 1` belong
        to the engines; or BUFFERS, for a pair of processes on one device, of which the actor's listens at `address`
        (rlpipe.weight_channel; `port` has no meaning then).
    """

    name: str
    address: str
    port: int
    world_size: int
    backend: str


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


@dataclass(frozen=True)
class WeightBucket:
    """Tensors that travel flattened, in one piece; all have the same dtype."""

    tensors: tuple[TensorSpec, ...]
    size_bytes: int


def checksum(data: "Buffer") -> str:
    """CRC-32 of the bytes of a flattened bucket, as 8 hexadecimal digits; sender and receivers compare it."""
    return f"{zlib.crc32(data):08x}"
