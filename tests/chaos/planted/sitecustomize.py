"""Faults for tests of healing, in every Python process that has this folder on its path and is told of one.

RLPIPE_CHAOS_BUCKET_SECONDS: the actor takes so long for each bucket of weights that a strike can hit it in the middle.
RLPIPE_CHAOS_WRONG_ANSWER: a file; the first engine that can remove it leaves out the log-probability of a token.
"""

import os
import time
from pathlib import Path
from typing import Any


def _slow_buckets(weight_sender: Any) -> None:
    fill = weight_sender._fill

    def slow_fill(*arguments: Any) -> None:
        time.sleep(float(os.environ["RLPIPE_CHAOS_BUCKET_SECONDS"]))
        fill(*arguments)

    weight_sender._fill = slow_fill


def _wrong_answers(responses: Any) -> None:
    from dataclasses import replace

    right = responses.ResponseWriter.write

    async def wrong(self: Any, request: Any) -> Any:
        answer = await right(self, request)
        try:
            Path(os.environ["RLPIPE_CHAOS_WRONG_ANSWER"]).unlink()
        except FileNotFoundError:
            return answer
        return replace(answer, logprobs=answer.logprobs[1:])

    responses.ResponseWriter.write = wrong


if "RLPIPE_CHAOS_BUCKET_SECONDS" in os.environ or "RLPIPE_CHAOS_WRONG_ANSWER" in os.environ:
    from rlpipe.jit_monitor.after_import import AfterImport

    hooks = AfterImport()
    if "RLPIPE_CHAOS_BUCKET_SECONDS" in os.environ:
        hooks.call("actor.weight_sender", _slow_buckets)
    if "RLPIPE_CHAOS_WRONG_ANSWER" in os.environ:
        hooks.call("rollout.responses", _wrong_answers)
