"""Per-token estimators of KL(policy || reference) from samples of the policy."""

import torch
from torch import Tensor


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """float32 [T] -> float32 [T], in nats.

    With d = logprobs - ref_logprobs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman, "Approximating KL
    divergence", 2020). k1 and k3 are unbiased; k3 is never negative.
    """
    difference = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.expm1(-difference) + difference
    raise ValueError(f"KL estimator {estimator!r}; known: k1, k2, k3")
