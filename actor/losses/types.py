"""What a loss function receives and returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """The tokens of ONE WHOLE pack in its own order, on the device, whatever the parallel layout: token tensors are
    float32 [T], aligned by prediction as in `rlpipe.shared.pack.Pack`, and 0 where `mask` is 0.

    logprobs: log-probability of each target under the policy being trained; the only one with a gradient besides
        `entropy`.
    entropy: entropy of the policy's distribution in nats; None for losses that do not ask for it.
    mask: 1 where the prediction is trained. weights: `mask` over the global denominator: the loss of a step is the sum
        of `weights * token_loss` over all packs of all ranks, so a loss function never divides by a token count.
    old_logprobs: under the policy that the ratio is taken against; None in an on-policy step, where the ratio is 1.
    rollout_logprobs: as the rollout engine reported them. ref_logprobs: under the reference policy, or None.
    sequence_ids: int64 [T], the number of the token's sequence within the pack, 0 to `sequences - 1`.
    """

    logprobs: Tensor
    mask: Tensor
    weights: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    sequence_ids: Tensor
    sequences: int
    entropy: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None

    @property
    def anchor_logprobs(self) -> Tensor:
        """`old_logprobs`, or the policy's own ones without gradient in an on-policy step."""
        return self.logprobs.detach() if self.old_logprobs is None else self.old_logprobs

    def sequence_sum(self, values: Tensor) -> Tensor:
        """[T] -> [sequences]: sum of `values` over the trained tokens of each sequence; differentiable."""
        sums = torch.zeros(self.sequences, dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.sequence_ids, values * self.mask)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[T] -> [sequences]: mean of `values` over the trained tokens of each sequence, 0 where it has none."""
        return self.sequence_sum(values) / self.sequence_sum(self.mask).clamp(min=1)

    def to_tokens(self, per_sequence: Tensor) -> Tensor:
        """[sequences] -> [T]: each token gets the value of its sequence."""
        return per_sequence[self.sequence_ids]


@dataclass(frozen=True)
class LossOutput:
    """Loss per token and what is to be logged. All scalars stay on the device; nothing is divided before all packs and
    ranks are added up.

    token_loss: float32 [T], finite where `mask` is 0.
    means: metric name -> (sum, count), logged as total sum over total count.
    totals: metric name -> sum, logged as the total (use it with `weights` for terms of the loss).
    maxima: metric name -> value, logged as the largest.
    """

    token_loss: Tensor
    means: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    totals: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
