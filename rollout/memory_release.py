"""Giving an engine's device memory back and taking it again, and emptying its cache of prefixes."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from rlpipe.shared.errors import EngineFailure, RolloutError
from rollout.arguments import EngineSetup
from rollout.requests import DeviceMemory
from rollout.scheduler_watch import SchedulerWatch

_IDLE_SECONDS = 30.0
_IDLE_POLL_SECONDS = 0.01


class MemoryRelease:
    """Of a started SGLang engine, by its TokenizerManager. Generation is paused while it is asked for anything."""

    def __init__(self, setup: EngineSetup, manager: Any, watch: SchedulerWatch) -> None:
        self._setup = setup
        self._manager = manager
        self._watch = watch
        self._freed: set[DeviceMemory] = set()

    def check_holds(self, call: str, *parts: DeviceMemory) -> None:
        """Raises RolloutError where one of `parts`, which `call` needs, has been given back."""
        for part in parts:
            if part in self._freed:
                raise RolloutError(
                    f"engine {self._setup.index} has given the device memory of its {part} back, so {call} is not "
                    f"possible: call RolloutPool.wake(({part!r},)) first"
                )

    def held(self, parts: Sequence[DeviceMemory]) -> list[DeviceMemory]:
        """Those of `parts` that are not given back."""
        return [part for part in parts if part not in self._freed]

    async def release(self, parts: Sequence[DeviceMemory]) -> None:
        """Call it when SGLang is idle; what was in `parts` is lost."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        request = ReleaseMemoryOccupationReqInput(tags=list(parts))
        await self._watch.call(self._manager.release_memory_occupation(request, None))
        self._freed.update(parts)

    async def resume(self, parts: Sequence[DeviceMemory]) -> None:
        """Takes memory again for those of `parts` that were given back."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if back := [part for part in parts if part in self._freed]:
            request = ResumeMemoryOccupationReqInput(tags=list(back))
            await self._watch.call(self._manager.resume_memory_occupation(request, None))
            self._freed.difference_update(back)

    async def empty_cache(self) -> None:
        """Waits until SGLang is idle, which it asserts when memory goes and is a moment after its last answer."""
        end = time.perf_counter() + _IDLE_SECONDS
        while not (await self._watch.call(self._manager.flush_cache())).success:
            if time.perf_counter() > end:
                raise EngineFailure(
                    f"engine {self._setup.index} is still busy {_IDLE_SECONDS:g} seconds after its last answer, so its "
                    f"cache cannot be emptied; see {self._setup.log_path}"
                )
            await asyncio.sleep(_IDLE_POLL_SECONDS)
