"""How long an engine drafts, told by its scheduler processes through files.

SGLang marks the stages of a pass for a profiler alone.
"""

import os
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from rlpipe.shared.disk_errors import left_out_when_full
from rlpipe.shared.replaced_parts import replaces

_SPAN = replaces(
    "sglang.srt.speculative.eagle_worker_v2:spec_stage_span",
    why="what the stages of a draft take is shown by a profiler alone",
    drop_when="SGLang's answer holds the seconds of drafting",
)

_FILES_VARIABLE = "RLPIPE_DRAFT_SECONDS"
_SECONDS = struct.Struct("d")


class Event(Protocol):
    """A moment of a device's stream, as `torch.cuda.Event`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Self, /) -> float:
        """Milliseconds."""


class DraftSeconds:
    """The engine's side: make it before the scheduler processes start."""

    def __init__(self, log_path: Path) -> None:
        self._prefix = log_path.with_suffix(".draft_seconds")
        for left in self._files():
            left.unlink()
        os.environ[_FILES_VARIABLE] = str(self._prefix)
        self._taken_seconds = 0.0

    def take(self) -> float:
        """Seconds since the last call, but for the pass that ended last, which is in the next answer. Tensor-parallel
        ranks draft at the same time: of the one that took longest."""
        told = [file.read_bytes() for file in self._files()]
        total = max((_SECONDS.unpack(content)[0] for content in told if len(content) == _SECONDS.size), default=0.0)
        seconds, self._taken_seconds = total - self._taken_seconds, total
        return seconds

    def _files(self) -> list[Path]:
        return list(self._prefix.parent.glob(f"{self._prefix.name}.*"))


class DraftClock:
    """Adds up the seconds of stages, from where the device begins one to where it has ended it. A device that waits
    for its host in between does nothing else meanwhile, so that counts, too."""

    def __init__(self, file: Path, event: Callable[[], Event]) -> None:
        self._descriptor: int | None = None
        with left_out_when_full():
            self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._event = event
        self._open: deque[tuple[Event, Event]] = deque()
        self._seconds = 0.0

    @contextmanager
    def stage(self) -> Iterator[None]:
        begin, end = self._event(), self._event()
        begin.record()
        yield
        end.record()
        self._open.append((begin, end))
        self._add_ended()

    def _add_ended(self) -> None:
        """Without waiting for the device."""
        while self._open and self._open[0][1].query():
            begin, end = self._open.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3
        if self._descriptor is not None:
            with left_out_when_full():
                os.pwrite(self._descriptor, _SECONDS.pack(self._seconds), 0)


def install() -> None:
    """Call in a scheduler process of an engine that drafts with the model's prediction layer, on a GPU then."""
    import torch
    from sglang.srt.speculative import eagle_worker_v2

    file = Path(f"{os.environ[_FILES_VARIABLE]}.{os.getpid()}")
    clock = DraftClock(file, partial(torch.cuda.Event, enable_timing=True))
    span = _SPAN.original()

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        with span(name), clock.stage():
            yield

    eagle_worker_v2.spec_stage_span = timed
