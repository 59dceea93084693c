"""Faults for tests of healing, in every Python process that has this folder on its path and is told of one.

RLPIPE_CHAOS_BUCKET_SECONDS: the actor takes so long for each bucket of weights that a strike can hit it in the middle.
RLPIPE_CHAOS_WRONG_ANSWER: a file; the first engine that can remove it leaves out the log-probability of a token.
RLPIPE_CHAOS_HANGING_ENGINE: a file; the first engine that can remove it hangs when it is to answer.
RLPIPE_CHAOS_HANGING_SCHEDULER: the same of an engine's scheduler, after a while of generating. All processes run on.
"""

import itertools
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_CALLS_BEFORE_HANGING = 40


def _slow_buckets(weight_sender: Any) -> None:
    fill = weight_sender._fill

    def slow_fill(*arguments: Any) -> None:
        time.sleep(float(os.environ["RLPIPE_CHAOS_BUCKET_SECONDS"]))
        fill(*arguments)

    weight_sender._fill = slow_fill


def _wrong_answers(responses: Any) -> None:
    from dataclasses import replace

    right = responses.ResponseWriter._write

    async def wrong(*arguments: Any) -> Any:
        answer = await right(*arguments)
        try:
            Path(os.environ["RLPIPE_CHAOS_WRONG_ANSWER"]).unlink()
        except FileNotFoundError:
            return answer
        return replace(answer, logprobs=answer.logprobs[1:])

    responses.ResponseWriter._write = wrong


def _hanging_engine(responses: Any) -> None:
    right = responses.ResponseWriter._write

    async def hanging(*arguments: Any) -> Any:
        _hang_once("RLPIPE_CHAOS_HANGING_ENGINE")
        return await right(*arguments)

    responses.ResponseWriter._write = hanging


def _hanging_scheduler(scheduler: Any) -> None:
    right, calls = scheduler.Scheduler.run_batch, itertools.count(1)

    def hanging(*arguments: Any, **named: Any) -> Any:
        if next(calls) == _CALLS_BEFORE_HANGING:
            _hang_once("RLPIPE_CHAOS_HANGING_SCHEDULER")
        return right(*arguments, **named)

    scheduler.Scheduler.run_batch = hanging


def _hang_once(variable: str) -> None:
    with suppress(FileNotFoundError):
        Path(os.environ[variable]).unlink()
        while True:
            time.sleep(1)


_FAULTS = {
    "RLPIPE_CHAOS_BUCKET_SECONDS": ("actor.weight_sender", _slow_buckets),
    "RLPIPE_CHAOS_WRONG_ANSWER": ("rollout.responses", _wrong_answers),
    "RLPIPE_CHAOS_HANGING_ENGINE": ("rollout.responses", _hanging_engine),
    "RLPIPE_CHAOS_HANGING_SCHEDULER": ("sglang.srt.managers.scheduler", _hanging_scheduler),
}
"""By variable: the module that has the fault once it is imported, and what gives it to it."""

_told = [fault for variable, fault in _FAULTS.items() if variable in os.environ]
if _told:
    from rlpipe.jit_monitor.after_import import AfterImport

    _hooks = AfterImport()
    for _module, _plant in _told:
        _hooks.call(_module, _plant)
