"""AdamW for the host and for the device, with moments in float32 or bfloat16.

Two classes, because Megatron's HybridDeviceOptimizer tells by the class whether a state belongs on the host.
"""

from collections.abc import Iterator
from typing import Any

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
                state.update({name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in _MOMENTS})
            assert parameter.grad is not None
            update_in_place(parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["step"], group)

    def _parameters_with_gradient(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter


class HostAdamBfloat16Moments(Bfloat16Moments, HostAdam):
    """`HostAdam` with moments in bfloat16."""


class DeviceAdamBfloat16Moments(Bfloat16Moments, DeviceAdam):
    """`DeviceAdam` with moments in bfloat16."""


def update_in_place(
    master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, group: dict[str, Any]
) -> None:
    """torch's fused AdamW on one tensor of each, on their device; `step` counts up.

    Moments in another dtype than float32 are rounded to it after the update, which happens in float32.
    """
    moments = exp_avg.float(), exp_avg_sq.float()
    adamw(
        [master],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],
        [step],
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    if exp_avg.dtype != torch.float32:
        exp_avg.copy_(moments[0])
        exp_avg_sq.copy_(moments[1])
