"""What Gated DeltaNet computes between its projections, behind one interface, with three backends.

`torch` runs everywhere and is the reference; `fla` (flash-linear-attention's Triton kernels) and `flashqla` (TileLang,
SM90 and newer) need CUDA and are imported only when chosen. All take key heads unrepeated: value head j belongs to key
head j // (value heads / key heads).
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from actor.layers.gdn_backend import GdnBackend
from actor.layers.gdn_torch import chunked_delta_rule, projected_heads
from actor.layers.packed import PackedSequences
from rlpipe.shared.errors import ActorError

logger = logging.getLogger(__name__)

Heads = Callable[[torch.Tensor, Sequence[torch.Tensor], tuple[int, int], PackedSequences], tuple[torch.Tensor, ...]]
DeltaRule = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, PackedSequences], torch.Tensor
]


@dataclass(frozen=True)
class GdnKernels:
    """backend: the name of what runs.

    heads(projected [T, c], weights, (K, V), sequences) -> query, key [T, HK, K], value [T, HV, V], z [T, HV x V], beta
        and alpha [T, HV]: the columns of `projected` in this order. weights: [channels, width] of query, key and value,
        which pass a depthwise causal convolution, where no token sees another sequence, and SiLU; each head of queries
        and keys is then divided by its norm.
    delta_rule(query, key [T, HK, K], value [T, HV, V], decay [T, HV] float32 (log space, <= 0), beta [T, HV] float32,
        sequences) -> [T, HV, V]; queries and keys are of length one, queries are scaled by K ** -0.5 inside.
    """

    backend: str
    heads: Heads
    delta_rule: DeltaRule


@lru_cache(maxsize=8)
def load_kernels(backend: GdnBackend) -> GdnKernels:
    """The kernels of a backend that `actor.layers.gdn_backend` has chosen; logs which they are.

    Raises:
        ActorError: its package cannot be imported.
    """
    kernels = {"torch": _torch_kernels, "fla": _fla_kernels, "flashqla": _flashqla_kernels}[backend]()
    logger.info("Gated DeltaNet runs on the %s backend", kernels.backend)
    return kernels


def _torch_kernels() -> GdnKernels:
    return GdnKernels("torch", projected_heads, chunked_delta_rule)


def _require(package: str, backend: str) -> Any:
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ActorError(f"actor.gdn_backend = {backend} cannot import {package} ({error}): install it") from error


def _fla_kernels() -> GdnKernels:
    # fla runs FlashQLA under its own name wherever that is importable, unless told otherwise before its import.
    os.environ["FLA_FLASH_QLA"] = "0"
    rule = _require("fla.ops.gated_delta_rule", "fla").chunk_gated_delta_rule

    def delta_rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        sequences: PackedSequences,
    ) -> torch.Tensor:
        out, _ = rule(
            *_batch_of_one(query, key, value),
            g=decay.unsqueeze(0),
            beta=beta.unsqueeze(0),
            cu_seqlens=sequences.ends_tensor,
            cu_seqlens_cpu=sequences.ends_tensor_host,
        )
        return out.squeeze(0)

    return GdnKernels("fla", _fused_heads, delta_rule)


def _flashqla_kernels() -> GdnKernels:
    """Without its automatic split of long sequences (`auto_cp`): how a sequence was computed would follow from those
    beside it in the pack, lengths would be copied to the host, and twice as many kernels compile."""
    rule = _require("flash_qla", "flashqla").chunk_gated_delta_rule

    def delta_rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        sequences: PackedSequences,
    ) -> torch.Tensor:
        out, _ = rule(
            *_batch_of_one(query, key, value),
            decay.unsqueeze(0),
            beta.unsqueeze(0),
            cu_seqlens=sequences.ends_tensor,
            auto_cp=False,
        )
        return out.squeeze(0)

    return GdnKernels("flashqla", _fused_heads, delta_rule)


def _fused_heads(
    projected: torch.Tensor,
    weights: Sequence[torch.Tensor],
    channels: tuple[int, int],
    sequences: PackedSequences,
) -> tuple[torch.Tensor, ...]:
    from actor.layers.gdn_inputs import ProjectedHeads

    heads: tuple[torch.Tensor, ...] = ProjectedHeads.apply(projected, *weights, sequences.places, *channels)
    return heads


def _batch_of_one(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """[T, heads, d] -> contiguous [1, T, heads, d], the kernels' packed layout."""
    return [tensor.unsqueeze(0).contiguous() for tensor in tensors]
