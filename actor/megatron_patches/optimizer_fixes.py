"""Fixes of Megatron's distributed optimizer (megatron-core 0.16.1). Process-global."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes

from rlpipe.shared.replaced_parts import replaces

replaces(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups",
    why="shards of float32 parameters are views that autograd tracks, on which no second optimizer can be built",
    drop_when="Megatron detaches them",
)


@lru_cache(maxsize=1)
def install_optimizer_fixes() -> None:
    """Install the fixes; further calls do nothing."""
    DistributedOptimizer._build_model_and_main_param_groups = classmethod(
        _with_detached_shards(DistributedOptimizer._build_model_and_main_param_groups.__func__)
    )


def _with_detached_shards(build: Callable[..., Any]) -> Callable[..., Any]:
    """distrib_optimizer.py:395 makes the shards of float32 parameters as views that autograd tracks: after an update
    in place a second optimizer cannot be built on them, which is what loading a checkpoint does."""

    def build_detached(cls: Any, ranges: Any, parameter_map: Any, group_ranges: list[Any], config: Any) -> Any:
        groups = build(cls, ranges, parameter_map, group_ranges, config)
        for group_range, shards in zip(group_ranges, groups[3], strict=True):
            shards[:] = [_detached(shard) for shard in shards]
            group_range["orig_group"]["params"][: len(shards)] = shards
        return groups

    return build_detached


def _detached(shard: torch.Tensor) -> torch.Tensor:
    alone = shard.detach()
    copy_tensor_model_parallel_attributes(alone, shard)
    if hasattr(shard, "shared"):
        alone.shared = shard.shared  # type: ignore[attr-defined]
    return alone
