"""Choosing tokens by the inverse of the cumulative distribution, each row by itself."""

import hashlib

import torch


def uniform_number(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(seed.to_bytes(8, "big") + position.to_bytes(8, "big"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def invert_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First token of each row whose cumulative weight exceeds `uniform` [batch] times the row's sum.

    `probs` [batch, vocabulary] need not sum to one; a token of weight zero is never returned.
    """
    cumulative = probs.to(torch.float64).cumsum(-1)
    total = cumulative[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(uniform[:, None] * total, below_total)
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def keep_top(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`probs` with zeros outside the `top_k` [batch] most likely tokens and the nucleus of share `top_p` [batch].

    The token that crosses the share belongs to the nucleus, and with a share of 1 all do, whatever their sum is rounded
    to. Ties are broken towards the lower token id.
    """
    sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
    before = sorted_probs.cumsum(-1, dtype=torch.float64) - sorted_probs
    rank = torch.arange(probs.shape[-1], device=probs.device)
    share = top_p[:, None]
    dropped = (rank >= top_k[:, None]) | ((before > share) & (share < 1.0))
    return torch.zeros_like(probs).scatter_(-1, order, sorted_probs.masked_fill(dropped, 0.0))
