"""Megatron's HybridDeviceOptimizer (megatron-core 0.16.1) with its states in host memory, on every device.

Every trained parameter counts as one on the device. A share of the states lives in host memory: where host and device
are one, `HostAdam` updates them there; on a GPU `StreamedAdam` updates them on the device. The rest stays on the
device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch import Tensor

from actor.adam import Bfloat16Moments, DeviceAdam, DeviceAdamBfloat16Moments, HostAdam, HostAdamBfloat16Moments
from actor.device import synchronize_compute
from actor.host_memory import HostMemory
from actor.streamed_adam import StreamedAdam
from actor.transfer_stream import copy_converted, has_transfers
from rlpipe.shared.replaced_parts import relies_on, replaces

replaces(
    "megatron.core.optimizer:CPUAdam",
    "megatron.core.optimizer:Adam",
    "megatron.core.optimizer:HybridDeviceOptimizer",
    "megatron.core.optimizer.distrib_optimizer:HybridDeviceOptimizer",
    why="Megatron looks up the optimizer's classes as globals",
    drop_when="they are arguments",
)
replaces(
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer._init_sub_optimizers",
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer._get_sub_optimizer_param_groups",
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer._set_sub_optimizer_grads",
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer.step",
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer.update_fp32_param_by_new_param",
    why="states in host memory on every device, in one dtype, updated where that is fast; each method says which line",
    drop_when="Megatron's own handles float32 parameters, CPUs and bfloat16 moments",
)
relies_on(
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer._sync_sub_optimizers_state_to_hdo",
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer._sync_hdo_param_groups_to_sub_optimizers",
    why="states and options stay the same in the outer optimizer and in the inner ones",
    drop_when="it is called with the step",
)
relies_on(
    "torch._C._VariableFunctions:_foreach_add_",
    why="one launch for all step counts",
    drop_when="torch names it without an underscore",
)

_MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdam(HybridDeviceOptimizer):
    """`streamed` holds the states of host memory where a GPU updates them; None elsewhere.

    host_memory: where those states are made, while `offloaded_adam` says so.
    """

    streamed: StreamedAdam | None = None
    host_memory: HostMemory | None = None

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **{**options, "pin_cpu_grads": False, "pin_cpu_params": False})

    def zero_state(self) -> None:
        """Give every inner optimizer its state before the first step, without moving a weight.

        Saving and loading read the state of every parameter, which Adam makes only in its first step.
        """
        for inner in self.sub_optimizers:
            dtype = _moments_dtype(inner)
            for group in inner.param_groups:
                for parameter in group["params"]:
                    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    moments = self._host_moments(parameter)
                    if not moments:
                        moments = {name: torch.zeros_like(parameter, dtype=dtype) for name in _MOMENTS}
                    inner.state[parameter] = {"step": step, **moments}
        self._sync_sub_optimizers_state_to_hdo()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.streamed is None:
            return super().step(closure)
        self._sync_hdo_param_groups_to_sub_optimizers()
        if self.gpu_optimizer is not None:
            self._set_device_gradients()
            self.gpu_optimizer.step()
        (host,) = self.cpu_optimizers
        steps = [host.state[parameter]["step"] for group in host.param_groups for parameter in group["params"]]
        self.streamed.step(int(steps[0].item()), host.param_groups, _gradient)
        torch._foreach_add_(steps, 1)
        self._sync_sub_optimizers_state_to_hdo()
        return None

    def close(self) -> None:
        """The states are needed no more."""
        if self.streamed is not None:
            self.streamed.close()

    def finish(self) -> None:
        """Returns once the states in host memory are those of the last step."""
        if self.streamed is not None:
            self.streamed.finish()

    def forget_uploaded(self) -> None:
        """The states in host memory were changed from outside."""
        if self.streamed is not None:
            self.streamed.forget()

    def update_fp32_param_by_new_param(self) -> None:
        self.finish()
        super().update_fp32_param_by_new_param()
        self.forget_uploaded()

    def _init_sub_optimizers(self) -> None:
        """hybrid_optimizer.py:336 builds everything anew after loading, though the parameters are the same objects."""
        if not hasattr(self, "param_to_inner_param"):
            super()._init_sub_optimizers()

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> tuple[Any, ...]:
        """Every parameter counts as one on the device (hybrid_optimizer.py:206 asks `is_cuda`)."""
        on_host = self._parameters_on_host(offload_fraction)
        if on_host and has_transfers():
            groups = [[p for p in group["params"] if p in on_host] for group in self.param_groups]
            rounded = issubclass(self.cpu_optimizer_cls, Bfloat16Moments)
            dtype = torch.bfloat16 if rounded else torch.float32
            self.streamed = StreamedAdam([group for group in groups if group], dtype, memory=self.host_memory)
        host_groups: list[dict[str, Any]] = []
        device_groups: list[dict[str, Any]] = []
        host_of, to_fp32 = {}, {}
        for group in self.param_groups:
            halves: dict[bool, list[Tensor]] = {True: [], False: []}
            for original in group["params"]:
                master = self._master(original, original in on_host)
                if master is not original and original.dtype != torch.float32:
                    to_fp32[original] = master
                if original in on_host:
                    host_of[original] = master
                halves[original in on_host].append(master)
            for half, parameters in ((host_groups, halves[True]), (device_groups, halves[False])):
                if parameters:
                    half.append({**group, "params": parameters})
        synchronize_compute()
        return host_groups, device_groups, host_of, {master: one for one, master in host_of.items()}, to_fp32

    def _parameters_on_host(self, offload_fraction: float) -> set[Tensor]:
        """The first parameters, until their states are `offload_fraction` of all."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        threshold = offload_fraction * sum(parameter.numel() for parameter in parameters)
        chosen: set[Tensor] = set()
        elements = 0
        for parameter in parameters:
            if elements < threshold:
                chosen.add(parameter)
                elements += parameter.numel()
        return chosen

    def _master(self, original: Tensor, on_host: bool) -> Tensor:
        if on_host and self.streamed is not None:
            master = self.streamed.host_views(original)[0]
            copy_converted(original.detach().view(-1), master)
            return master
        if on_host or self.param_update_in_fp32 and original.dtype != torch.float32:
            return original.detach().clone().float()
        return original

    def _host_moments(self, master: Tensor) -> dict[str, Tensor]:
        """Where the moments of a master in page-locked memory are; {} for others."""
        original = self.cpu_copys_map_gpu_param.get(master)
        if original is None or self.streamed is None:
            return {}
        return dict(zip(_MOMENTS, self.streamed.host_views(original)[1:], strict=True))

    def _set_device_gradients(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.gpu_params_map_cpu_copy:
                    master = self.param_to_inner_param[parameter]
                    master.grad = _gradient(parameter).to(master.dtype)

    def _set_sub_optimizer_grads(self) -> None:
        """hybrid_optimizer.py:88 hands gradients on to copies only: a float32 parameter that is updated in place on the
        device has none, and a precision-aware gradient (`decoupled_grad`) would never reach it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.param_to_inner_param[parameter] is parameter:
                    parameter.grad = getattr(parameter, "decoupled_grad", parameter.grad)
        super()._set_sub_optimizer_grads()


def _moments_dtype(adam: torch.optim.Optimizer) -> torch.dtype:
    return torch.bfloat16 if isinstance(adam, Bfloat16Moments) else torch.float32


def _gradient(parameter: Tensor) -> Tensor:
    """Megatron's precision-aware gradient, or torch's."""
    gradient = getattr(parameter, "decoupled_grad", None)
    gradient = parameter.grad if gradient is None else gradient
    assert gradient is not None
    return gradient


class _Placeholder(OffloadedAdam):
    """Parameter groups and options alone. DistributedOptimizer takes them over from the optimizer it is given, and
    makes one of its own for its shards: states of whole parameters would be made in vain."""

    def __init__(self, params: Any, **options: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, defaults=options)


@contextmanager
def offloaded_adam(moments_dtype: str, host_memory: HostMemory | None = None) -> Iterator[None]:
    """Within the block Megatron builds its optimizers from this module's class and those of `actor.adam`, with states
    in `host_memory`.

    Megatron looks the classes up as globals; there is no argument for them.
    """
    half = moments_dtype == "bfloat16"
    replaced = [
        (megatron_optimizer, "CPUAdam", HostAdamBfloat16Moments if half else HostAdam),
        (megatron_optimizer, "Adam", DeviceAdamBfloat16Moments if half else DeviceAdam),
        (megatron_optimizer, "HybridDeviceOptimizer", _Placeholder),
        (distrib_optimizer, "HybridDeviceOptimizer", OffloadedAdam),
        (OffloadedAdam, "host_memory", host_memory),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, replacement in replaced:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)
