"""Per-token estimators of KL(policy || reference) from samples of the policy. Pure: works on arrays of any library."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

Values = TypeVar("Values", bound=Any)


def kl_estimate(difference: Values, estimator: str, expm1: Callable[[Values], Values]) -> Values:
    """In nats, of the shape of `difference` d = log policy - log reference; expm1: of the arrays' library.

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman, "Approximating KL divergence", 2020). k1 and k3 are unbiased;
    k3 is never negative. Raises ValueError for another estimator.
    """
    match estimator:
        case "k1":
            return difference
        case "k2":
            return cast(Values, difference**2 / 2)
        case "k3":
            return cast(Values, expm1(-difference) + difference)
    raise ValueError(f"KL estimator {estimator!r}; known: k1, k2, k3")
