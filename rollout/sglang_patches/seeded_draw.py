"""Seeded sampling on a GPU whose noise is finite and belongs to tokens.

SGLang hashes every token of the vocabulary in every step, and divides by the largest hash: one of 2^32 numbers becomes
infinite noise, also of a token that top-p leaves out. With a vocabulary of 200,000 that is once in some 20,000 steps.
Its noise belongs to places in the row it draws from, and where any request of a batch is filtered, it sorts all rows:
a request without top-p would draw other tokens beside one that has it than alone.
"""

import torch

from rlpipe.shared.replaced_parts import replaces
from rollout.sglang_patches.inverse_cdf import keep_top

replaces(
    "sglang.srt.layers.sampler:multinomial_with_seed",
    why="a hash of all ones becomes infinite noise, which takes its token whatever its probability",
    drop_when="SGLang's uniform numbers lie between 0 and 1 and reach neither",
)

_FILTERED = replaces(
    "sglang.srt.layers.sampler:top_k_top_p_min_p_sampling_from_probs_torch",
    why="a request would draw other tokens beside filtered ones than alone",
    drop_when="SGLang's noise belongs to tokens, not to places in sorted rows",
)

_HASHES = 2**32


def install() -> None:
    """Call in a scheduler process that samples with seeds on a GPU."""
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32
    from sglang.srt.layers import sampler

    def multinomial_with_seed(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(logprobs.shape[1], device=logprobs.device)
        return largest_with_noise(logprobs, murmur_hash32(seed.to(torch.uint64), positions, columns))

    sampler.multinomial_with_seed = torch.compile(multinomial_with_seed, dynamic=True)
    original = _FILTERED.original()

    def draw_filtered(
        probs: torch.Tensor,
        top_ks: torch.Tensor,
        top_ps: torch.Tensor,
        min_ps: torch.Tensor,
        need_min_p_sampling: bool,
        sampling_seed: torch.Tensor | None,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        if need_min_p_sampling or sampling_seed is None:
            return original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions)
        return sampler.sampling_from_probs_torch(keep_top(probs, top_ks, top_ps), sampling_seed, positions)

    sampler.top_k_top_p_min_p_sampling_from_probs_torch = draw_filtered


def largest_with_noise(logprobs: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """A sample of each row, int64 [rows, 1], by the Gumbel-max trick (Maddison et al. 2014, arXiv:1411.0030).

    logprobs: natural logarithms of weights, [rows, columns]; -inf is never taken. hashes: of 32 bits, evenly
    distributed, [rows, columns].
    """
    uniform = (hashes.to(torch.float64) + 0.5) / _HASHES
    return torch.argmax(logprobs.to(torch.float64) - torch.log(-torch.log(uniform)), dim=1, keepdim=True)
