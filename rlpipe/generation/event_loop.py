"""An asyncio event loop in a thread of its own, so that responses are generated while the driver does other things."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

_CLOSE_SECONDS = 10.0


class BackgroundLoop:
    """Runs coroutines until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Starts it; its result or error can be waited for from any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancels what is running and ends the thread. A task that takes no notice, as one that waits for a thread of
        somebody else's that hangs, is left behind; it ends with the process."""
        self.submit(_cancel_others()).result(2 * _CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_CLOSE_SECONDS)
    # What is left would be told of as forgotten when its memory is freed.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
