"""Drafted tokens are kept exactly as far as the engine's own sampler would have drawn them.

SGLang draws other random numbers for verifying than for sampling, so that a sample would change with the drafts; and
without CUDA it takes the most likely token whatever the temperature. Here each node of a draft gets the token that
the sampler draws after it, from the same probabilities and with the random number of the same position: drafts below
it are kept as long as they are these tokens. So what is sampled has the distribution of no drafts, whoever drafts,
and depends on the seed and the position alone, not on how many tokens were drafted at a time. A draft of probability
p is kept with probability p, as with SGLang's rule.
"""

import copy
from functools import cache
from importlib import import_module
from typing import Any

import torch

from rlpipe.shared.replaced_parts import relies_on, replaces

_VERIFY = replaces(
    "sglang.srt.speculative.eagle_utils:eagle_sample",
    "sglang.srt.speculative.eagle_worker_common:eagle_sample",
    "sglang.srt.speculative.ngram_worker:eagle_sample",
    why="samples would change with their drafts, and with how many requests run beside them",
    drop_when="SGLang verifies with the random numbers that it samples with",
)

relies_on(
    "sglang.srt.layers.sampler:Sampler._sample_from_probs",
    why="a draft is verified with what the sampler draws from the same probabilities",
    drop_when="SGLang verifies with the random numbers that it samples with",
)


def install(worker: str) -> None:
    """Call in a scheduler process of an engine that drafts. worker: SGLang's module whose worker verifies."""
    original = _VERIFY.original()

    def verify(draft: Any, batch: Any, output: Any, grammar_mask: Any = None) -> tuple[torch.Tensor, ...]:
        info = batch.sampling_info
        if batch.forward_mode.is_idle() or info.is_all_greedy or grammar_mask is not None:
            return original(draft, batch, output, grammar_mask)
        drawn = drawn_tokens(_sampler(), output.next_token_logits, info, draft.draft_token_num, draft.positions)
        return kept_tokens(draft, _same_on_all_ranks(drawn))

    for name in ("eagle_utils", worker):
        import_module(f"sglang.srt.speculative.{name}").eagle_sample = verify  # type: ignore[attr-defined]


def drawn_tokens(sampler: Any, logits: torch.Tensor, info: Any, nodes: int, positions: torch.Tensor) -> torch.Tensor:
    """What `sampler` draws after each node, int64 [requests x nodes].

    logits: float [requests x nodes, vocabulary], which stay as they are: log-probabilities are made of them. info: of
    the requests, SGLang's SamplingBatchInfo. positions: of the nodes in their sequences, [requests x nodes].
    """
    repeated = copy.copy(info)
    for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"):
        values = getattr(info, name)
        if values is not None:
            setattr(repeated, name, values.repeat_interleave(nodes, dim=0))
    unfiltered = not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling)
    probabilities = torch.softmax(logits / repeated.temperatures, dim=-1)
    tokens: torch.Tensor = sampler._sample_from_probs(probabilities, repeated, positions, unfiltered)
    return tokens.to(torch.int64)


def kept_tokens(draft: Any, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """SGLang's answer of a verification: the token after each node, int32 [requests x nodes]; how many tokens each
    request gets, int32 [requests]; and the nodes that they follow, int32 [requests, depth], -1 behind the last.

    draft: SGLang's EagleVerifyInput or NgramVerifyInput. drawn: of `drawn_tokens`.
    """
    from sglang.srt.speculative.eagle_utils import verify_tree_greedy_func

    shape = (-1, draft.draft_token_num)
    candidates = draft.draft_token.reshape(shape)
    predicted, kept, lengths = verify_tree_greedy_func(
        predicts=torch.zeros_like(drawn, dtype=torch.int32),
        accept_index=drawn.new_full((len(candidates), draft.max_tree_depth), -1, dtype=torch.int32),
        accept_token_num=drawn.new_empty(len(candidates), dtype=torch.int32),
        candidates=candidates,
        retrieve_index=draft.retrieve_index,
        retrieve_next_token=draft.retrieve_next_token,
        retrieve_next_sibling=draft.retrieve_next_sibling,
        target_predict=drawn.reshape(shape),
        topk=draft.tree_topk,
    )
    return predicted, lengths + 1, kept


@cache
def _sampler() -> Any:
    """As the model's runner makes one."""
    from sglang.srt.layers.sampler import create_sampler

    return create_sampler()


def _same_on_all_ranks(drawn: torch.Tensor) -> torch.Tensor:
    """Of rank 0: probabilities may differ in the last bits, and one rank that keeps another number of tokens hangs."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size > 1:
        group.broadcast(drawn, src=0)
    return drawn
