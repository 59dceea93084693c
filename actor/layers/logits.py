"""What a softmax over logits comes to, and its gradient, each from one reading of the logits on a GPU.

Written as single operators in float32 they move some forty bytes for each logit forward and eighty backward, as one
kernel two and four; with a vocabulary of 150,000 that is more than the head's products take.
"""

from typing import NamedTuple, Self

import torch

from actor.layers.fusion import computed_by

_KERNELS = "actor.layers.triton_logits"


class Chosen(NamedTuple):
    """Of each row. column: int64 [n], that of its target among these logits. here: float32 [n], 1 where they have it
    and 0 where another rank does."""

    column: torch.Tensor
    here: torch.Tensor


class SoftmaxParts(NamedTuple):
    """Of each row x of logits over its temperature, float32 [n] each; other ranks have those of other columns.

    largest: the largest x. powers: sum of exp(x - largest). weighted: sum of exp(x - largest) (x - largest), 0 where
    it is not asked for. target: x of the target, 0 where it is not here.
    """

    largest: torch.Tensor
    powers: torch.Tensor
    weighted: torch.Tensor
    target: torch.Tensor

    @classmethod
    def of_nothing(cls, rows: torch.Tensor) -> Self:
        """Of as many rows without a column as `rows` has elements."""
        zero = torch.zeros(len(rows), dtype=torch.float32, device=rows.device)
        return cls(torch.full_like(zero, torch.finfo(torch.float32).min), zero, zero, zero)


@computed_by(_KERNELS)
def softmax_parts(
    logits: torch.Tensor, chosen: Chosen, temperatures: torch.Tensor | None, with_weighted: bool
) -> SoftmaxParts:
    """logits: [n, columns], at least one column, whose memory may be used. temperatures: float32 [n], 1 when left
    out."""
    x = _tempered(logits, temperatures)
    target = x.gather(1, chosen.column[:, None]).squeeze(1) * chosen.here
    largest = x.amax(-1)
    powers = x.sub_(largest[:, None]).exp()
    total = powers.sum(-1)
    weighted = powers.mul_(x).sum(-1) if with_weighted else torch.zeros_like(total)
    return SoftmaxParts(largest, total, weighted, target)


@computed_by(_KERNELS)
def logit_gradient(
    logits: torch.Tensor,
    normalizer: torch.Tensor,
    chosen: Chosen,
    of_logprob: torch.Tensor,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None,
    temperatures: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient of `logits`, in their dtype; their memory may be used.

    With p = softmax(logits / temperature): d logprob = onehot - p, d entropy = -p (log p + entropy), both over the
    temperature. normalizer: float32 [n], log of the softmax's denominator over all ranks. of_logprob: float32 [n],
    gradient of the targets' log-probabilities. of_entropy: (entropy, its gradient), float32 [n] each, where it has one.
    """
    log_p = _tempered(logits, temperatures).sub_(normalizer[:, None])
    p = log_p.exp()
    gradient = p * -of_logprob[:, None]
    gradient.scatter_add_(1, chosen.column[:, None], (chosen.here * of_logprob)[:, None])
    if of_entropy is not None:
        entropy, upstream = of_entropy
        gradient -= p.mul_(log_p.add_(entropy[:, None])).mul_(upstream[:, None])
    if temperatures is not None:
        gradient.div_(temperatures[:, None])
    return gradient.to(logits.dtype)


def _tempered(logits: torch.Tensor, temperatures: torch.Tensor | None) -> torch.Tensor:
    """Float32, in the same memory where they are that already."""
    return logits.float() if temperatures is None else logits.float().div_(temperatures[:, None])
