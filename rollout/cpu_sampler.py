"""Sampling on a CPU engine that depends on a request's own probabilities and seed, and on nothing else in the batch."""

import hashlib

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class SeededSampler(Sampler):
    """Inverse-CDF sampling with one uniform number per token, hashed from the request's seed and the token's position.

    SGLang's own seeded sampling is a Triton kernel; its unfiltered and its filtered path choose different tokens, so
    that a top-p request in the batch would change its neighbours' tokens. Here all rows take the same path.
    """

    def _sample_from_probs(
        self,
        probs: torch.Tensor,
        sampling_info: SamplingBatchInfo,
        positions: torch.Tensor,
        simple_sampling_case: bool,
    ) -> torch.Tensor:
        """Token ids [batch], int32, from `probs` [batch, vocabulary] after temperature."""
        if not simple_sampling_case:
            probs = keep_top(probs, sampling_info.top_ks, sampling_info.top_ps)
        uniform = torch.tensor(
            [
                uniform_number(seed, position)
                for seed, position in zip(sampling_info.sampling_seed.tolist(), positions.tolist(), strict=True)
            ],
            dtype=torch.float64,
        )
        return invert_cdf(probs, uniform).to(torch.int32)


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

    The token that crosses the share belongs to the nucleus. Ties are broken towards the lower token id.
    """
    sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
    before = sorted_probs.cumsum(-1) - sorted_probs
    rank = torch.arange(probs.shape[-1])
    dropped = (rank >= top_k[:, None]) | (before > top_p[:, None])
    return torch.zeros_like(probs).scatter_(-1, order, sorted_probs.masked_fill(dropped, 0.0))
