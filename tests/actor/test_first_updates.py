"""With fresh moments Adam's first updates are its largest: what docs/algorithms.md says of them and of the warm-up."""

import math

import pytest
import torch

from rlpipe.config.actor import OptimizerConfig

OPTIMIZER = OptimizerConfig()


def _sizes(warmup: int, updates: int = 80) -> list[float]:
    """Root mean square of each update over the peak learning rate, where gradients are nothing but noise."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(torch.zeros(20_000))
    adam = torch.optim.Adam([weights], lr=1.0, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2))
    sizes = []
    for step in range(1, updates + 1):
        adam.param_groups[0]["lr"] = min(1.0, step / warmup)
        before = weights.detach().clone()
        weights.grad = torch.randn(weights.shape, generator=generator)
        adam.step()
        sizes.append((weights.detach() - before).square().mean().sqrt().item())
    return sizes


@pytest.mark.parametrize(("warmup", "over_later"), [(1, 4.4), (5, 2.0), (20, 1.14)])
def test_the_largest_update_is_the_one_that_ends_the_warm_up(warmup, over_later):
    sizes = _sizes(warmup)
    assert sizes.index(max(sizes)) + 1 == warmup
    beta1 = OPTIMIZER.beta1
    later = math.sqrt((1 - beta1) / (1 + beta1))  # of an average of noise with weights (1 - beta1) beta1^n
    assert sizes[-1] == pytest.approx(later, rel=0.03)
    assert max(sizes) / sizes[-1] == pytest.approx(over_later, rel=0.03)
