"""AdamW for the host and for the device, with moments in float32 or bfloat16.

Two classes, because Megatron's HybridDeviceOptimizer tells by the class whether a state belongs on the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from torch import Tensor
from torch.optim.adamw import adamw

_MOMENTS = ("exp_avg", "exp_avg_sq")


class HostAdam(torch.optim.AdamW):
    """Updates the parameters whose masters live in host memory."""


class DeviceAdam(torch.optim.AdamW):
    """Updates the parameters whose masters live on the device."""


class Bfloat16Moments(torch.optim.AdamW):
    """Keeps both moments in bfloat16 between steps; the update itself is torch's, in float32, one parameter at a time.

    Halves the host memory of the moments at the cost of 8 bits of mantissa: a change of a moment below 1/256 of its
    value is lost, which a second moment with beta2 of 0.98 or less does not run into.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter in self._parameters_with_gradient():
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state.update({name: torch.zeros_like(parameter) for name in _MOMENTS})
            for name in _MOMENTS:
                state[name] = state[name].float()
            _update(parameter, state, group)
            for name in _MOMENTS:
                state[name] = state[name].bfloat16()

    def _parameters_with_gradient(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter


class HostAdamBfloat16Moments(Bfloat16Moments, HostAdam):
    """`HostAdam` with moments in bfloat16."""


class DeviceAdamBfloat16Moments(Bfloat16Moments, DeviceAdam):
    """`DeviceAdam` with moments in bfloat16."""


def _update(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    adamw(
        [parameter],
        [parameter.grad],  # type: ignore[list-item]
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state["step"]],
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


@contextmanager
def adam_classes(moments_dtype: str) -> Iterator[None]:
    """Within the block Megatron builds its optimizers from the classes of this module.

    Megatron looks the two classes up as globals of its optimizer package; there is no argument for them.
    """
    before = megatron_optimizer.CPUAdam, megatron_optimizer.Adam
    half = moments_dtype == "bfloat16"
    megatron_optimizer.CPUAdam = HostAdamBfloat16Moments if half else HostAdam
    megatron_optimizer.Adam = DeviceAdamBfloat16Moments if half else DeviceAdam
    try:
        yield
    finally:
        megatron_optimizer.CPUAdam, megatron_optimizer.Adam = before
