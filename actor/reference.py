"""The reference policy: a second set of what is trained, in host memory, swapped in for its forward passes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch

from actor.device import synchronize
from actor.hf.adapter_modules import adapters
from actor.host_memory import host_tensors_like


class ReferenceWeights:
    """Copies of `parameters`, and room for the policy's while they are swapped out."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        self.weights = host_tensors_like(self.parameters)
        self._policy = host_tensors_like(self.parameters)
        self.take_policy()

    @classmethod
    def without_adapters(cls, chunks: Sequence[torch.nn.Module]) -> Self:
        """The model as it is without its adapters: theirs are zero, which adds exactly nothing, and all other weights
        are the policy's own."""
        reference = cls([factor for lora in adapters(chunks) for factor in lora.parameters()])
        for weight in reference.weights:
            weight.zero_()
        return reference

    def take_policy(self) -> None:
        """The policy's present weights become the reference."""
        self._copy(self.parameters, self.weights)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block the model has the reference weights; afterwards the policy's are back, bit by bit."""
        self._copy(self.parameters, self._policy)
        self._copy(self.weights, self.parameters)
        try:
            yield
        finally:
            self._copy(self._policy, self.parameters)

    @torch.no_grad()
    def _copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        synchronize()
