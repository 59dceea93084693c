"""Waiting for what nobody can trust to end."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

Result = TypeVar("Result")


async def within(seconds: float, work: Awaitable[Result], ended: Callable[[], None] = lambda: None) -> Result:
    """The result of `work`. Raises TimeoutError after `seconds`, and then does not wait for it to take notice.

    `ended` is called when the work is really over, be it long after that.
    """
    task = asyncio.ensure_future(work)

    def look_at(done: "asyncio.Future[Any]") -> None:
        ended()
        if not done.cancelled():
            done.exception()  # nobody waits for it any more where there was a time-out

    task.add_done_callback(look_at)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        raise TimeoutError
    if task.cancelled():
        raise RuntimeError("it was cancelled from within")
    return task.result()


def call_within(seconds: float, function: Callable[[], Result], name: str) -> Result:
    """What `function` returns or raises, run in a thread that does not keep the process alive.

    Raises TimeoutError after `seconds`; the thread goes on, since nothing can stop it.
    """
    ended: Future[Result] = Future()

    def run() -> None:
        try:
            ended.set_result(function())
        except BaseException as error:  # SystemExit must not vanish with its thread
            ended.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    threading.Thread(target=run, name=name, daemon=True).start()
    wait([ended], seconds)
    if not ended.done():
        raise TimeoutError
    return ended.result()


async def in_thread(function: Callable[[], Any], name: str) -> Any:
    """What `function` returns, run in a thread of its own that does not keep the process alive.

    When the caller is cancelled, that takes effect once the thread has ended: a thread cannot be stopped.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if error is None:
            ended.set_result(result)
        else:
            ended.set_exception(error)

    def run() -> None:
        result: Any = None
        problem: BaseException | None = None
        try:
            result = function()
        except BaseException as error:  # SystemExit must not vanish with its thread, nor StopIteration end a coroutine
            usual = isinstance(error, Exception) and not isinstance(error, StopIteration)
            problem = error if usual else RuntimeError(repr(error))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=run, name=name, daemon=True).start()
    cancelled = False
    while not ended.done():
        try:
            await asyncio.wait({ended})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        ended.exception()
        raise asyncio.CancelledError
    return ended.result()
