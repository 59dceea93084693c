"""Sampling on a CPU engine that depends on a request's own probabilities and seed, and on nothing else in the batch."""

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from rlpipe.shared.replaced_parts import replaces
from rollout.sglang_patches.inverse_cdf import invert_cdf, keep_top, uniform_number

replaces(
    "sglang.srt.layers.sampler:Sampler._sample_from_probs",
    why="SGLang's seeded sampling is a Triton kernel, whose choice depends on the batch",
    drop_when="it samples on a CPU, in one way for all requests",
)


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
