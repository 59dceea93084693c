"""Calls inside a pool's engine, past its public methods: for looking at it, not for use."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from rollout.fleet import RunningEngine


def in_engine(engine: RunningEngine, called: Callable[..., Any], *arguments: Any) -> Any:
    """Awaits a coroutine function of the engine in its event loop. Ray runs the call in a thread beside that."""

    def call(served: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(called(served, *arguments), served._sglang.loop).result()

    return ray.get(engine.actor.__ray_call__.remote(call))


def begin_trace(engine: RunningEngine, folder: Path, steps: int) -> None:
    """Has the engine leave a trace of its GPU in its next `steps` steps in `folder`, which is made."""

    async def begin(served: Any, trace: str) -> None:
        from sglang.srt.managers.io_struct import ProfileReq, ProfileReqType

        await served._sglang.tokenizer_manager.start_profile(
            ProfileReq(req_type=ProfileReqType.START_PROFILE, output_dir=trace, num_steps=steps, activities=["GPU"])
        )

    folder.mkdir(parents=True)
    in_engine(engine, begin, str(folder))
