"""Two senders of weights in a process of their own, as small as the protocol allows."""

from datetime import timedelta

import ray
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    _new_process_group_helper,
    _world,
)

from rlpipe.shared.weights import StackedExperts, TensorSpec, WeightBucket, WeightGroup, checksum, experts_part

_SENDERS = (3, 5)


def plan_of(tensors: dict[str, torch.Tensor], buckets: int) -> tuple[WeightBucket, ...]:
    """Consecutive tensors in about as many as `buckets` buckets, which come from both senders by turns."""
    specs = [TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    size = -(-len(specs) // buckets)
    parts = [tuple(specs[start : start + size]) for start in range(0, len(specs), size)]
    return tuple(WeightBucket(part, _SENDERS[number % 2]) for number, part in enumerate(parts))


def in_parts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacked experts in halves, as two expert-parallel ranks send them."""
    found = {}
    for name, tensor in tensors.items():
        if StackedExperts.of_name(name) is None:
            found[name] = tensor
            continue
        middle = len(tensor) // 2
        found[experts_part(name, 0, middle - 1)] = tensor[:middle]
        found[experts_part(name, middle, len(tensor) - 1)] = tensor[middle:]
    return found


@ray.remote(num_cpus=0, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
class WeightSource:
    def open(self, readers: int) -> WeightGroup:
        """The group that this process and `readers` processes of engines can now join."""
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return WeightGroup("weights", ("127.0.0.1",), self._store.port, _SENDERS, readers, "gloo", 2**20)

    def join(self, group: WeightGroup) -> None:
        self._groups = {}
        for sender in group.senders:
            name, size = group.name_of(sender), 1 + group.readers
            self._groups[sender], _ = _new_process_group_helper(
                size,
                0,
                [],
                Backend(group.backend),
                PrefixStore(name, self._store),
                group_name=GroupName(name),
                timeout=timedelta(seconds=60),
            )
            _world.pg_group_ranks[self._groups[sender]] = {index: index for index in range(size)}

    def send(self, tensors: dict[str, torch.Tensor], plan: tuple[WeightBucket, ...]) -> tuple[str, ...]:
        """Broadcasts and returns the checksums of what was sent."""
        sums = []
        for bucket in plan:
            flat = torch.zeros(bucket.size_bytes, dtype=torch.uint8)
            for spec, piece in zip(bucket.tensors, bucket.pieces(flat), strict=True):
                piece.copy_(tensors[spec.name])
            dist.broadcast(flat, src=0, group=self._groups[bucket.sender])
            sums.append(checksum(flat.numpy().data))
        return tuple(sums)
