"""The engine's side of shared buffers, without an engine."""

from typing import Any

import torch

from rlpipe.weights import WeightBucket, checksum
from rollout.weight_sources import SharedBuffers


def read_buckets(plan: tuple[WeightBucket, ...], source: SharedBuffers) -> tuple[dict[str, Any], tuple[str, ...]]:
    """One round of buckets: the tensors by name as float32 arrays, and the checksums of the buckets."""
    tensors, sums = {}, []
    for bucket in plan:
        with source.bucket(sum(spec.elements for spec in bucket.tensors), torch.bfloat16) as flat:
            here = flat.to("cpu", copy=True)
        sums.append(checksum(here.view(torch.uint8).numpy().data))
        parts = here.float().split([spec.elements for spec in bucket.tensors])
        specs = zip(bucket.tensors, parts, strict=True)
        tensors |= {spec.name: part.reshape(spec.shape).numpy() for spec, part in specs}
    return tensors, tuple(sums)


def read_rounds(addresses: Any, layouts: list[str], device: str, rounds: int = 2) -> dict[str, Any]:
    """For each layout that a sender puts (address, plan) of into the queue `addresses`: what its rounds bring."""
    results = {}
    for name in layouts:
        address, plan = addresses.get(timeout=200)
        source = SharedBuffers(address, device)
        results[name] = [read_buckets(plan, source) for _ in range(rounds)]
        source.leave()
    return results
