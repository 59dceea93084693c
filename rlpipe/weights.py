"""What sender and receivers of weights agree on: the group they meet in and the plan of buckets.

The plan is made once by the actor and given to both sides, so an update needs no conversation: the sender broadcasts
the buckets in order, each engine receives them in order, and the version is set after the last.
"""

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True)
class WeightGroup:
    """The process group of an update: rank 0 sends, ranks 1 to `world_size - 1` belong to the engines."""

    name: str
    address: str
    port: int
    world_size: int
    backend: str


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
    """Tensors that travel flattened in one broadcast; all have the same dtype."""

    tensors: tuple[TensorSpec, ...]
    size_bytes: int


def checksum(data: "Buffer") -> str:
    """CRC-32 of the bytes of a flattened bucket, as 8 hexadecimal digits; sender and receivers compare it."""
    return f"{zlib.crc32(data):08x}"
