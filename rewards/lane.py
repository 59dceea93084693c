"""Remote grading beside the processes of a pool: one thread, one event loop, many requests at a time."""

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from rewards.remote_grader import Service, ask, client
from rlpipe.shared.sample import Reward


class RemoteLane:
    """Has at most `connections` responses out at a time; the others wait without their deadline running."""

    def __init__(self, connections: int) -> None:
        self._connections = connections
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="grading-remote", daemon=True)
        self._thread.start()
        self._ready.wait()

    def submit(
        self, response: str, label: str, options: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> "Future[Reward]":
        """Ask the service that `options` describe; the future raises what `rewards.remote_grader.ask` raises."""
        service = Service(**options)
        asking = self._ask(service, response, label, facts.get("prompt", ""), facts.get("metadata", {}))
        return asyncio.run_coroutine_threadsafe(asking, self._loop)

    def close(self) -> None:
        """Cancel what is out and end the thread."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        self._stop = asyncio.Event()
        self._turn = asyncio.Semaphore(self._connections)
        async with client(self._connections) as self._http:
            self._ready.set()
            await self._stop.wait()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _ask(self, *arguments: Any) -> Reward:
        async with self._turn:
            return await ask(self._http, *arguments)
