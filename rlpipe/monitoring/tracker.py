"""What a tracker is."""

from collections.abc import Mapping, Sequence
from typing import Protocol

SampleRow = Mapping[str, object]
"""A graded sample as a row: id, prompt, response, label, reward, correct, reason."""


class Tracker(Protocol):
    """Receives the metrics of an iteration, once, and a few of its graded samples."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(self, iteration: int, rows: Sequence[SampleRow]) -> None: ...

    def close(self, failed: bool) -> None: ...
