"""The reference policy: a second set of weights in host memory, swapped in for its forward passes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from actor.device import host_buffer_like, synchronize


class ReferenceWeights:
    """Copies of all parameters of this rank's chunks, and room for the policy's while they are swapped out."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self.weights = [host_buffer_like(parameter) for parameter in self._parameters]
        self._policy = [host_buffer_like(parameter) for parameter in self._parameters]
        self.take_policy()

    def take_policy(self) -> None:
        """The policy's present weights become the reference."""
        self._copy(self._parameters, self.weights)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block the model has the reference weights; afterwards the policy's are back, bit by bit."""
        self._copy(self._parameters, self._policy)
        self._copy(self.weights, self._parameters)
        try:
            yield
        finally:
            self._copy(self._policy, self._parameters)

    @torch.no_grad()
    def _copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        synchronize()
