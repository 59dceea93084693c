"""How full an engine was over an iteration that is traced: requests that run and wait, and its KV pool."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rlpipe.shared.phases import Counter
from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin.get_loads",
    why="SGLang's scheduler writes how full it is into memory that this process reads, without a message",
    drop_when="SGLang's Engine has a call for it",
)

_EVERY_SECONDS = 0.25


class EngineCounters:
    """Looks now and then while `keep` was asked for.

    loads: SGLang's snapshots of its schedulers, one for each data-parallel rank.
    """

    def __init__(self, loads: Callable[[], Awaitable[Sequence[Any]]]) -> None:
        self._loads = loads
        self._found: list[Counter] = []
        self._looking: asyncio.Task[None] | None = None

    async def attach(self) -> None:
        """Opens SGLang's file in shared memory, which goes once the engine has started."""
        await self._loads()

    def take(self, keep: bool) -> tuple[Counter, ...]:
        """What was seen since the last call; whether to look until the next one."""
        found, self._found = tuple(self._found), []
        if keep and self._looking is None:
            self._looking = asyncio.create_task(self._look())
        elif not keep:
            self.stop()
        return found

    def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look(self) -> None:
        while True:
            for load in await self._loads():
                now = time.time()
                requests = {"running": float(load.num_running_reqs), "queued": float(load.num_waiting_reqs)}
                self._found.append(Counter("requests", now, requests))
                self._found.append(Counter("KV pool", now, {"used share": float(load.token_usage)}))
            await asyncio.sleep(_EVERY_SECONDS)
