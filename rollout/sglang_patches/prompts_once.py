"""Requests of one prompt that wait together compute it once: one of them goes first, the others find it in the cache.

SGLang starts them in one pass, in which each computes the whole prompt, for nothing is in the cache yet. Samples of a
group come together. `rollout/shared_prompts.py` does the same for long prompts with a request of its own; here it is
done within a scheduler, at the cost of a pass alone, which on a CPU is worth it for short ones, too.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from rlpipe.shared.replaced_parts import relies_on, replaces

_GET_PREFILL = replaces(
    "sglang.srt.managers.scheduler:Scheduler.get_new_batch_prefill",
    why="requests that wait with the same prompt each compute it",
    drop_when="SGLang holds all but one of them back",
)
relies_on(
    "sglang.srt.managers.schedule_policy:match_prefix_for_req",
    why="it tells how much of a prompt is in the cache",
    drop_when="SGLang holds all but one of the requests back that wait with the same prompt",
)

_LEAST_SAVED_TOKENS = 256  # below, another pass costs more than it saves


def install() -> None:
    """Call in a scheduler's process, where passes of any size cost what their tokens cost."""
    from sglang.srt.managers.schedule_policy import match_prefix_for_req
    from sglang.srt.managers.scheduler import Scheduler

    original = _GET_PREFILL.original()

    def get_new_batch_prefill(self: Any, running_batch: Any) -> Any:
        if self.tree_cache.disable or self.chunked_req is not None:
            return original(self, running_batch)

        def cached_tokens(request: Any) -> int:
            match_prefix_for_req(self.tree_cache, request)
            return len(request.prefix_indices)

        waiting, slots = self.waiting_queue, max(0, self.get_num_allocatable_reqs(len(running_batch.reqs)))
        held = held_back(waiting[:slots], cached_tokens)
        if not held:
            return original(self, running_batch)
        # What waits behind the free slots is not to come before those that are held back.
        self.waiting_queue = [request for request in waiting[:slots] if request.rid not in held]
        plan = original(self, running_batch)
        left = {request.rid for request in self.waiting_queue}
        not_tried = waiting[slots:]
        self.waiting_queue = [one for one in waiting[:slots] if one.rid in held or one.rid in left] + not_tried
        return plan

    Scheduler.get_new_batch_prefill = get_new_batch_prefill


def held_back(waiting: Sequence[Any], cached_tokens: Callable[[Any], int]) -> set[str]:
    """Ids of those SGLang requests of `waiting` that another one of them computes the prompt for; none where that is
    not worth a pass. cached_tokens: of a request's prompt."""
    groups = defaultdict(list)
    for request in waiting:
        groups[request.extra_key, (request.origin_input_ids + request.output_ids).tobytes()].append(request)
    held: set[str] = set()
    saved = 0
    for first, *others in groups.values():
        shared = len(first.origin_input_ids) + len(first.output_ids) - 1  # the last token is always computed
        missing = shared - cached_tokens(first) if others else 0
        if missing > 0:
            held.update(request.rid for request in others)
            saved += missing * len(others)
    return held if saved >= _LEAST_SAVED_TOKENS else set()
