"""Drawing tokens on a GPU in two kernels, where nothing is left out and no request has a seed.

SGLang's own way makes probabilities, exponential noise and two logarithms of a whole vocabulary, each a float32 tensor
of its own: about 30 passes over the logits, where one is enough.
"""

from typing import Any

import torch

from rlpipe.shared.replaced_parts import relies_on, replaces

_FORWARD = replaces(
    "sglang.srt.layers.sampler:Sampler.forward",
    why="drawing a token passes about 30 times over float32 logits",
    drop_when="SGLang draws from logits in one kernel and tells the log-probability with it",
)

relies_on(
    "sglang.srt.layers.sampler:Sampler._preprocess_logits",
    "sglang.srt.layers.sampler:Sampler._sync_token_ids_across_tp",
    "sglang.srt.layers.sampler:SGLANG_RETURN_ORIGINAL_LOGPROB",
    why="what SGLang does before and after a draw stays",
    drop_when="Sampler.forward is not replaced any more",
)


def install() -> None:
    """Call in a scheduler's process of an engine on a GPU."""
    from sglang.srt.layers import sampler

    from rollout.sglang_patches.triton_draw import draw_tokens

    original = _FORWARD.original()

    def forward(
        self: Any,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int] | None,
        token_ids_logprobs: list[list[int] | None] | None,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        others_wanted = any(top_logprobs_nums or ()) or any(one is not None for one in token_ids_logprobs or ())
        if not draws_plainly(self, sampling_info) or others_wanted or sampler.SGLANG_RETURN_ORIGINAL_LOGPROB:
            return original(
                self, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
            )
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        # From the generator that SGLang seeds alike in all processes of an engine, which have to draw the same.
        seeds = torch.randint(-(2**63), 2**63 - 1, logits.shape[:1], device=logits.device)
        tokens, logprobs = draw_tokens(logits, sampling_info.temperatures.flatten(), seeds)
        if return_logprob:
            logits_output.next_token_logprobs = logprobs
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens

    sampler.Sampler.forward = forward


def draws_plainly(sampler: Any, sampling_info: Any) -> bool:
    """Whether every request of a batch draws from its whole distribution, by chance alone."""
    filtered = (
        sampling_info.need_top_k_sampling or sampling_info.need_top_p_sampling or sampling_info.need_min_p_sampling
    )
    return not (
        filtered
        or sampling_info.is_all_greedy
        or sampling_info.sampling_seed is not None
        or any(sampling_info.return_sampling_masks or ())
        or sampler.enable_deterministic
        or sampler.use_ascend_backend
    )
