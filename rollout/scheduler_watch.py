"""Notices when SGLang's processes die or stop, and fails whatever waits for them; SGLang would let it wait forever."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from rlpipe.shared.descendants import is_stopped
from rlpipe.shared.errors import EngineFailure
from rlpipe.shared.replaced_parts import relies_on
from rollout.failures import first_failure, last_exception, log_tail, printed_since_start

relies_on(
    "sglang.srt.managers.tokenizer_manager:TokenizerManager._subprocess_watchdog",
    "sglang.srt.utils.watchdog:SubprocessWatchdog._processes",
    why="the processes to watch; SGLang's own watchdog ends the whole process tree when one is lost",
    drop_when="SGLang fails its requests when a scheduler dies",
)

_LIVENESS_SECONDS = 0.5
_STOPPED_LOOKS = 3  # a debugger may stop a process for a moment


class SchedulerWatch:
    """Of engine `index`, whose processes print into `log_path`. Tasks of one event loop wait for SGLang under it."""

    def __init__(self, index: int, log_path: str) -> None:
        self._index = index
        self._log_path = log_path
        self._death: EngineFailure | None = None
        self._waiting: set[asyncio.Task[Any]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self, manager: Any) -> None:
        """Watches the processes of SGLang's TokenizerManager from now on."""
        self._task = asyncio.create_task(self._watch(manager._subprocess_watchdog._processes))

    def end(self, manager: Any) -> None:
        """SGLang is going to be stopped: neither this nor its own watchdog minds any more."""
        if self._task is not None:
            self._task.cancel()
        if manager is not None:
            manager._subprocess_watchdog.stop()
            self._death = EngineFailure(f"engine {self._index} was stopped")

    def check(self) -> None:
        """Raises EngineFailure once SGLang has died."""
        if self._death is not None:
            raise self._death

    def add(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """They are cancelled when SGLang dies; `check` tells why."""
        self._waiting |= set(tasks)

    def remove(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        self._waiting -= set(tasks)

    async def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Awaits SGLang's answer, or raises when SGLang dies."""
        self.check()
        task = asyncio.create_task(coroutine)
        self.add([task])
        try:
            return await task
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            self.remove([task])

    async def _watch(self, processes: Sequence[Any]) -> None:
        stopped = 0
        while all(process.is_alive() for process in processes) and stopped < _STOPPED_LOOKS:
            await asyncio.sleep(_LIVENESS_SECONDS)
            stopped = stopped + 1 if any(is_stopped(process.pid) for process in processes) else 0
        self._death = EngineFailure(
            f"engine {self._index} died: {_what_happened(processes, self._log_path)}; log: {self._log_path}; its last "
            f"lines:\n{log_tail(self._log_path)}"
        )
        for task in self._waiting:
            task.cancel()


def _what_happened(processes: Sequence[Any], log_path: str) -> str:
    for process in processes:
        if not process.is_alive():
            ended = f"SGLang's process {process.pid} ended with exit code {process.exitcode}"
            if process.exitcode < 0:  # by a signal
                return ended
            said = first_failure(printed_since_start(log_path)) or last_exception(log_tail(log_path))
            return f"{ended} after {said}" if said else ended
    stopped = [process.pid for process in processes if is_stopped(process.pid)]
    return f"SGLang's process {stopped[0] if stopped else processes[0].pid} was stopped and does not go on"
