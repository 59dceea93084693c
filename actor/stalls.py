"""The settings of this process's monitor, and the file that its stacks go to when a call stalls."""

import logging
from collections.abc import Callable
from pathlib import Path

from rlpipe.config.jit import JitConfig
from rlpipe.jit_monitor import JitSettings, StepStall

_log = logging.getLogger(__name__)


def jit_settings(jit: JitConfig) -> JitSettings:
    """The start-up counts as one more step of warm-up."""
    return JitSettings(
        warmup_steps=1 + jit.warmup_iterations,
        stall_factor=jit.stall_factor,
        stall_minimum_seconds=jit.stall_minimum_seconds,
        sample_seconds=min(1.0, jit.stall_minimum_seconds / 4),
    )


def stall_log(rank: int, log_directory: str | None) -> Callable[[StepStall], None]:
    """Appends to `actor-<rank>.stalls.txt`; to this process's log where there is no folder."""

    def write(stall: StepStall) -> None:
        if log_directory is None:
            _log.warning("%s", stall)
            return
        path = Path(log_directory) / f"actor-{rank}.stalls.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{stall}\n\n")

    return write
