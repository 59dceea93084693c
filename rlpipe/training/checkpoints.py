"""When to save, what the driver adds to a checkpoint, and where to resume."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlpipe.config.root import Config
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.checkpoint_folder import latest_checkpoint
from rlpipe.shared.errors import CheckpointError


@dataclass(frozen=True)
class RunState:
    """What a checkpoint keeps beside the actor's own state. `iteration` is the last one finished.

    `pending` are numbers of prompts that were taken and not trained, because generation was ahead or was interrupted.
    """

    iteration: int = 0
    epoch: int = 0
    position: int = 0
    pending: Sequence[int] = ()


def checkpoint_is_due(config: Config, iteration: int) -> bool:
    """Every `checkpoint.interval_iterations`, and after the last iteration."""
    interval = config.checkpoint.interval_iterations
    return interval > 0 and (iteration == config.run.iterations or iteration % interval == 0)


def has_checkpoint(config: Config) -> bool:
    """Whether the run's folder holds a complete checkpoint."""
    return latest_checkpoint(RunDirectory.of(config).checkpoints) is not None


def checkpoint_to_resume(directory: RunDirectory, resume: bool) -> Path | None:
    """The newest complete checkpoint, or None without `resume`. Raises CheckpointError when there is none."""
    if not resume:
        return None
    checkpoint = latest_checkpoint(directory.checkpoints)
    if checkpoint is None:
        raise CheckpointError(
            f"{directory.checkpoints}: no complete checkpoint to resume from; start again with --overwrite, and set "
            "checkpoint.interval_iterations to save some"
        )
    return checkpoint
