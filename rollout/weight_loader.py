"""Loads tensors into the engine's model, stacked experts in one copy each.

SGLang's loader takes experts one by one, which costs tens of microseconds each, far more than copying their bytes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

_PARAMETERS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}


class WeightLoader:
    """Stacked experts go through SGLang's loader the first time. Where the engine's parameter then equals the stacked
    tensor, kernels keep them as they come, and they are copied whole from then on."""

    def __init__(self) -> None:
        self._copied: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def load(self, model: Any, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """tensors: by Hugging Face name; a layer's experts one by one, or stacked as [experts, rows, columns]."""
        by_loader: list[tuple[str, torch.Tensor]] = []
        new: list[tuple[str, torch.Tensor]] = []
        for name, tensor in tensors:
            if name in self._copied:
                self._copied[name].copy_(tensor)
            elif _is_stacked(name):
                by_loader += _apart(name, tensor)
                new.append((name, tensor))
            else:
                by_loader.append((name, tensor))
        if by_loader:
            model.load_weights(by_loader)
        if new:
            self._learn(dict(model.named_parameters(remove_duplicate=False)), new)

    def _learn(self, parameters: dict[str, torch.Tensor], loaded: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in loaded:
            root, _, kind = name.rpartition(".")
            parameter = parameters.get(f"{root}.{_PARAMETERS[kind]}".replace("language_model.", ""))
            if parameter is not None and _keeps(parameter, tensor, kind):
                self._copied[name] = parameter.data


def _is_stacked(name: str) -> bool:
    return name.rpartition(".experts.")[2] in _PARAMETERS


def _apart(name: str, stacked: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same experts one by one."""
    root, _, kind = name.rpartition(".")
    for index, expert in enumerate(stacked):
        if kind == "down_proj":
            yield f"{root}.{index}.down_proj.weight", expert
            continue
        gate, up = expert.chunk(2)
        yield f"{root}.{index}.gate_proj.weight", gate
        yield f"{root}.{index}.up_proj.weight", up


def _keeps(parameter: torch.Tensor, stacked: torch.Tensor, kind: str) -> bool:
    """Whether the parameter is the stacked tensor; where gate and up are equal their order cannot be told."""
    if parameter.shape != stacked.shape or parameter.dtype != stacked.dtype:
        return False
    if kind == "gate_up_proj" and torch.equal(*stacked.chunk(2, dim=1)):
        return False
    return torch.equal(parameter, stacked)
