"""Receiving a bucket of weights in a scheduler process.

Replaces SGLang's own function, which makes every tensor and then a second copy of them all just to know the bucket's
size, and which cannot tell what arrived.
"""

import math
import os
from typing import Any

import torch
import torch.distributed

from rlpipe.weights import checksum

VERIFY_VARIABLE = "RLPIPE_VERIFY_WEIGHTS"


def install() -> None:
    """Call once, before the scheduler starts."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    WeightUpdater._update_bucketed_weights_from_distributed = receive_bucket


def receive_bucket(
    updater: Any, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str
) -> tuple[bool, str]:
    """Receives all tensors of a bucket as one flat tensor of their common dtype, from rank 0, and loads them.

    Returns whether it worked and a message: the checksum of the received bytes where verification is on, else empty.
    The checksum is of what arrived, before SGLang's loader puts it into its fused and sharded parameters.
    """
    (dtype,) = {getattr(torch, name) for name in dtypes}
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.empty(sum(sizes), dtype=dtype, device=updater.device)
    try:
        torch.distributed.broadcast(flat, src=0, group=updater._model_update_group[group_name])
        pieces = zip(names, flat.split(sizes), shapes, strict=True)
        updater.get_model().load_weights([(name, piece.view(shape)) for name, piece, shape in pieces])
    except Exception as error:  # the answer must reach the engine whatever happened, or it waits for ever
        return False, f"{type(error).__name__}: {error}"
    return True, _agreed_checksum(flat) if os.environ.get(VERIFY_VARIABLE) == "1" else ""


def _agreed_checksum(flat: torch.Tensor) -> str:
    """Checksum that all tensor-parallel ranks computed, or a list of the different ones."""
    from sglang.srt.distributed import get_tp_group

    mine = checksum(flat.cpu().view(torch.uint8).numpy().data)
    group = get_tp_group()
    if group.world_size == 1:
        return mine
    all_ranks: list[str] = [""] * group.world_size
    torch.distributed.all_gather_object(all_ranks, mine, group=group.cpu_group)
    return mine if len(set(all_ranks)) == 1 else ",".join(all_ranks)
