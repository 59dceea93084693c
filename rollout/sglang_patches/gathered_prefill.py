"""Requests that wait for one of an engine's slots are taken up several at a time.

Where more requests wait than an engine runs at a time, the slots become free one by one, and SGLang computes the prompt
of the next request at once: a pass over a few tokens, which all running requests wait for, and which on a GPU is no
CUDA graph, as a step of decoding is. With responses of 300 tokens in 256 slots that is a pass for nearly every step.
"""

from typing import Any

from rlpipe.shared.replaced_parts import replaces

_GET_PREFILL = replaces(
    "sglang.srt.managers.scheduler:Scheduler.get_new_batch_prefill",
    why="every slot that becomes free is filled by a pass of its own",
    drop_when="min_free_slots_delay takes more than four slots, and no more than requests wait",
)

_GATHERED_SHARE = 16
"""Of the slots one in so many: what is idle meanwhile is a thirty-second of them on average."""


def install() -> None:
    """Call in a scheduler's process."""
    from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler

    original = _GET_PREFILL.original()

    def get_new_batch_prefill(self: Any, running_batch: Any) -> Any:
        running = len(running_batch.reqs)
        if self.chunked_req is None and waits_for_slots(
            running, self.get_num_allocatable_reqs(running), len(self.waiting_queue)
        ):
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        return original(self, running_batch)

    Scheduler.get_new_batch_prefill = get_new_batch_prefill


def waits_for_slots(running: int, free: int, waiting: int) -> bool:
    """Whether more slots are to become free before any of the `waiting` requests is taken up. All start at once where
    there is room for all."""
    return running > 0 and free < min(waiting, (running + free) // _GATHERED_SHARE)
