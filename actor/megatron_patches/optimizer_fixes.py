"""Fixes of Megatron's distributed and hybrid-device optimizers (megatron-core 0.16.1). Process-global."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes

from actor import adam


@lru_cache(maxsize=1)
def install_optimizer_fixes() -> None:
    """Install the fixes; further calls do nothing."""
    DistributedOptimizer._build_model_and_main_param_groups = classmethod(
        _with_detached_shards(DistributedOptimizer._build_model_and_main_param_groups.__func__)
    )
    HybridDeviceOptimizer._set_sub_optimizer_grads = _with_float32_parameters(
        HybridDeviceOptimizer._set_sub_optimizer_grads
    )
    HybridDeviceOptimizer._update_fp32_params_by_new_state = _masters_from_state
    HybridDeviceOptimizer._move_new_state_to_right_device = _state_next_to_masters


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


def _with_float32_parameters(set_gradients: Callable[[Any], None]) -> Callable[[Any], None]:
    """hybrid_optimizer.py:88 hands gradients on to copies only: a float32 parameter that is updated in place on the
    device has none, and a precision-aware gradient (`decoupled_grad`) would never reach it."""

    def set_all_gradients(self: Any) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.param_to_inner_param[parameter] is parameter:
                    parameter.grad = getattr(parameter, "decoupled_grad", parameter.grad)
        set_gradients(self)

    return set_all_gradients


def _masters_from_state(self: Any) -> None:
    """hybrid_optimizer.py:373 looks for a float32 copy of every parameter, also of those that are float32 already."""
    for parameter, state in self.state.items():
        self.param_to_inner_param[parameter].data.copy_(state["master_param"])


def _state_next_to_masters(self: Any) -> None:
    """hybrid_optimizer.py:353 moves the state of device parameters to "cuda", also where the device is another one."""
    for optimizer in self.sub_optimizers:
        for parameter, state in optimizer.state.items():
            original = self.inner_param_to_orig_param.get(parameter, parameter)
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    self.state[original][name] = state[name] = value.to(parameter.device)


def zero_state(optimizer: Any) -> None:
    """Give every inner optimizer of a Megatron optimizer its state before the first step, without moving a weight.

    Saving and loading read the state of every parameter, which Adam makes only in its first step.
    """
    for part in optimizer.chained_optimizers:
        hybrid = part.optimizer
        if hybrid is None:
            continue
        for inner in hybrid.sub_optimizers:
            dtype = torch.bfloat16 if isinstance(inner, adam.Bfloat16Moments) else torch.float32
            for group in inner.param_groups:
                for parameter in group["params"]:
                    inner.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                        "exp_avg": torch.zeros_like(parameter, dtype=dtype),
                        "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype),
                    }
        hybrid._sync_sub_optimizers_state_to_hdo()


def compact_state(optimizer: Any) -> None:
    """Let go of the whole tensors that the shards of a loaded state are views of."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:
            continue
        for state in part.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if state[name].untyped_storage().nbytes() > state[name].nbytes:
                    state[name] = state[name].clone()
