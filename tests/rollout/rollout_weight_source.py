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
    rendezvous,
)

from rlpipe.weights import TensorSpec, WeightBucket, WeightGroup, checksum


def plan_of(tensors: dict[str, torch.Tensor], buckets: int) -> tuple[WeightBucket, ...]:
    """Consecutive tensors in about as many as `buckets` buckets."""
    specs = [TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    size = -(-len(specs) // buckets)
    parts = [tuple(specs[start : start + size]) for start in range(0, len(specs), size)]
    return tuple(WeightBucket(part, sum(4 * spec.elements for spec in part)) for part in parts)


@ray.remote(num_cpus=0, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
class WeightSource:
    def join(self, group: WeightGroup) -> None:
        store, rank, size = next(rendezvous(f"tcp://{group.address}:{group.port}", 0, group.world_size))
        self._group, _ = _new_process_group_helper(
            size,
            rank,
            [],
            Backend(group.backend),
            PrefixStore(group.name, store),
            group_name=GroupName(group.name),
            timeout=timedelta(seconds=60),
        )
        _world.pg_group_ranks[self._group] = {index: index for index in range(size)}

    def send(self, tensors: dict[str, torch.Tensor], plan: tuple[WeightBucket, ...]) -> tuple[str, ...]:
        """Broadcasts and returns the checksums of what was sent."""
        sums = []
        for bucket in plan:
            flat = torch.cat([tensors[spec.name].reshape(-1) for spec in bucket.tensors])
            dist.broadcast(flat, src=0, group=self._group)
            sums.append(checksum(flat.view(torch.uint8).numpy().data))
        return tuple(sums)
