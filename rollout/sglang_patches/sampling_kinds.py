"""A batch samples in the way that the requests in it ask for, whatever those asked for that have left it.

SGLang notes of a batch whether a request of it leaves out tokens (top-k, top-p, min-p, or greedy, which is a top-k of
one), and then draws the tokens of all its requests with filters, on a CPU by sorting the vocabulary for each. The notes
of batches are joined as the batches are, and stay when requests end. So one filtered request would slow an engine for
as long as it is never empty: one that generates beside training, until the run's end.
"""

from typing import Any

from rlpipe.shared.replaced_parts import replaces

_FILTER_BATCH = replaces(
    "sglang.srt.managers.schedule_batch:ScheduleBatch.filter_batch",
    why="a filtered request that has ended would slow the others of its batch until all of them have ended",
    drop_when="SGLang's SamplingBatchInfo.filter_batch notes anew whether anything is filtered",
)


def install() -> None:
    """Call in a scheduler's process."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    original = _FILTER_BATCH.original()

    def filter_batch(self: Any, *arguments: Any, **keywords: Any) -> None:
        before = len(self.reqs)
        original(self, *arguments, **keywords)
        if not 0 < len(self.reqs) < before:
            return
        kinds, info = [request.sampling_params for request in self.reqs], self.sampling_info
        info.need_top_k_sampling = any(kind.top_k != TOP_K_ALL for kind in kinds)
        info.need_top_p_sampling = any(kind.top_p != 1.0 for kind in kinds)
        info.need_min_p_sampling = any(kind.min_p > 0 for kind in kinds)

    ScheduleBatch.filter_batch = filter_batch
