"""Keeping generation and weight updates apart inside an engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

ABORT_EVERY_SECONDS = 0.05


class GenerationPause:
    """Generation runs while nothing pauses or holds it. Whoever pauses is alone; requests that come meanwhile wait."""

    def __init__(self, held: bool = False) -> None:
        self._changed = asyncio.Condition()
        self._paused = False
        self._held = held
        self._running = 0

    @asynccontextmanager
    async def running(self, ends: Callable[[], bool] = lambda: False) -> AsyncIterator[None]:
        """Waits while generation is paused, and counts as running for the block. What `ends` is not held after a
        pause: it is asked whenever one is over."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._paused and (not self._held or ends()))
            self._running += 1
        try:
            yield
        finally:
            async with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def paused(self, abort: Callable[[], None] | None = None) -> AsyncIterator[None]:
        """Pauses generation, waits until no request is running, and lets it go on after the block.

        `abort` is called again and again meanwhile, to end running requests sooner: one call alone can miss a request
        that counts as running and is not known to SGLang yet.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: not self._paused)
            self._paused = True
        try:
            await self._wait_until_idle(abort)
            yield
        finally:
            async with self._changed:
                self._paused = False
                self._changed.notify_all()

    def hold(self) -> None:
        """Generation waits also after this pause, until a later one calls `release`. Call it while pausing."""
        self._held = True

    def release(self) -> None:
        """Generation goes on when this pause ends. Call it while pausing."""
        self._held = False

    async def _wait_until_idle(self, abort: Callable[[], None] | None) -> None:
        while self._running:
            if abort is not None:
                abort()
            async with self._changed:
                try:
                    timeout = None if abort is None else ABORT_EVERY_SECONDS
                    await asyncio.wait_for(self._changed.wait_for(lambda: not self._running), timeout)
                except TimeoutError:
                    continue
