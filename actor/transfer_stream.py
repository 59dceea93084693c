"""Copies between host and device beside what the device computes. On a CPU everything happens at once, in order."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TypeAlias

import torch

Event: TypeAlias = torch.cuda.Event | None
"""A point in a stream; None on a CPU, where it has passed already."""

_CONVERTED_ELEMENTS = 2**26
"""In one piece: device memory for so many is taken while it is on its way."""


@cache
def has_transfers() -> bool:
    """Whether host and device have memory of their own, so that something has to be transferred. Layers ask, and torch
    would ask the driver each time."""
    return torch.cuda.is_available()


class TransferStream:
    """One direction of copies. Work given to it runs in order, and beside the compute stream."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if has_transfers() else None

    def after(self, event: Event) -> None:
        """What comes next waits for `event` of another stream."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Copies inside the block belong to this stream."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def record(self) -> Event:
        """The point behind everything given to this stream so far."""
        return None if self._stream is None else self._stream.record_event()


def copy_converted(source: torch.Tensor, target: torch.Tensor) -> None:
    """Values of `source` [n] go to `target` [n] in the target's dtype; what runs on the host next may be early.

    They are converted on the source's device, a piece at a time. Left to one copy, torch would move them as they are
    into memory of its own, which is not page-locked, and convert them there by one thread.
    """
    for values, into in zip(source.split(_CONVERTED_ELEMENTS), target.split(_CONVERTED_ELEMENTS), strict=True):
        into.copy_(values.to(into.dtype), non_blocking=True)


def record_compute() -> Event:
    """The point behind everything given to the compute stream so far."""
    return torch.cuda.current_stream().record_event() if has_transfers() else None


def compute_after(event: Event) -> None:
    """What the compute stream is given next waits for `event`."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def wait_on_host(event: Event) -> None:
    """Returns once `event` has passed."""
    if event is not None:
        event.synchronize()
