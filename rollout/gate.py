"""Keeping generation and weight updates apart inside an engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_HURRY_EVERY_SECONDS = 0.05


class Gate:
    """Requests pass while it is open. Whoever closes it is alone inside; requests that come meanwhile wait."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._closed = False
        self._inside = 0

    @property
    def is_closed(self) -> bool:
        return self._closed

    @asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Waits until the gate is open, and counts as inside for the block."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            async with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def closed(self, hurry: Callable[[], None] | None = None) -> AsyncIterator[None]:
        """Closes the gate, waits until nobody is inside, and opens it after the block.

        `hurry` is called now and then meanwhile, to make those inside come out sooner: one call alone can miss a
        request that has passed the gate and is not known to SGLang yet.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed)
            self._closed = True
        try:
            await self._wait_until_empty(hurry)
            yield
        finally:
            async with self._changed:
                self._closed = False
                self._changed.notify_all()

    async def _wait_until_empty(self, hurry: Callable[[], None] | None) -> None:
        while self._inside:
            if hurry is not None:
                hurry()
            async with self._changed:
                try:
                    timeout = None if hurry is None else _HURRY_EVERY_SECONDS
                    await asyncio.wait_for(self._changed.wait_for(lambda: not self._inside), timeout)
                except TimeoutError:
                    continue
