"""A sender of weights in a process of its own, as small as the protocol allows."""

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

from rlpipe.shared.weights import TensorSpec, WeightBucket, WeightGroup, checksum


def plan_of(tensors: dict[str, torch.Tensor], buckets: int) -> tuple[WeightBucket, ...]:
    """Consecutive tensors in about as many as `buckets` buckets."""
    specs = [TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    size = -(-len(specs) // buckets)
    parts = [tuple(specs[start : start + size]) for start in range(0, len(specs), size)]
    return tuple(WeightBucket(part, sum(4 * spec.elements for spec in part)) for part in parts)


@ray.remote(num_cpus=0, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
class WeightSource:
    def open(self, readers: int) -> WeightGroup:
        """The group that this process and `readers` processes of engines can now join."""
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return WeightGroup("weights", ("127.0.0.1",), self._store.port, 1 + readers, "gloo")

    def join(self, group: WeightGroup) -> None:
        self._group, _ = _new_process_group_helper(
            group.world_size,
            0,
            [],
            Backend(group.backend),
            PrefixStore(group.name, self._store),
            group_name=GroupName(group.name),
            timeout=timedelta(seconds=60),
        )
        _world.pg_group_ranks[self._group] = {index: index for index in range(group.world_size)}

    def send(self, tensors: dict[str, torch.Tensor], plan: tuple[WeightBucket, ...]) -> tuple[str, ...]:
        """Broadcasts and returns the checksums of what was sent."""
        sums = []
        for bucket in plan:
            flat = torch.cat([tensors[spec.name].reshape(-1) for spec in bucket.tensors])
            dist.broadcast(flat, src=0, group=self._group)
            sums.append(checksum(flat.view(torch.uint8).numpy().data))
        return tuple(sums)
