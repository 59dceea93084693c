"""How many (query, key) pairs of softmax attention count as work."""

from enum import StrEnum


class Convention(StrEnum):
    """A FLOPs figure without its convention is meaningless: the two extremes differ by 1.6x at 131k tokens.

    causal_half: `s^2 / 2` pairs of a sequence of `s` tokens; Megatron-LM, Megatron-Bridge, slime, verl.
    causal_exact: `s (s + 1) / 2`, the pairs that a causal kernel computes.
    full: `s^2`, no credit for any mask, sliding windows included; PaLM, nanoGPT, TRL, torchtitan.
    """

    CAUSAL_HALF = "causal_half"
    CAUSAL_EXACT = "causal_exact"
    FULL = "full"


def doubled_pairs(length: int, convention: Convention, window: int | None = None) -> int:
    """Twice the pairs of one sequence of `length` tokens: twice, because half of an odd square is no integer.

    With a sliding `window` of W keys (the token itself included) a query at position p sees min(p + 1, W) keys, so
    causal_exact counts `W (W + 1) / 2 + (s - W) W` and causal_half, without the diagonal's half, `W^2 / 2 + (s - W) W`.
    """
    if convention is Convention.FULL:
        return 2 * length**2
    reach = length if window is None else min(length, window)
    beyond_the_window = 2 * (length - reach) * reach
    diagonal = reach if convention is Convention.CAUSAL_EXACT else 0
    return reach**2 + diagonal + beyond_the_window
