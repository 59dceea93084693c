"""When to save, what the driver adds to a checkpoint, and where to resume."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlpipe.config.root import Config
from rlpipe.monitoring.console import Console
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.checkpoint_folder import latest_checkpoint, set_aside
from rlpipe.shared.errors import ActorLostError, CheckpointError, DamagedCheckpointError, RlpipeError
from rlpipe.shared.interrupts import finishing, raise_if_requested
from rlpipe.training.iteration import IterationLog, IterationRecord

if TYPE_CHECKING:
    from actor.group import ActorGroup


@dataclass(frozen=True)
class RunState:
    """What a checkpoint keeps beside the actor's own state. `iteration` is the last one finished.

    `pending` are numbers of prompts that were taken and not trained, because generation was ahead or was interrupted.
    """

    iteration: int = 0
    epoch: int = 0
    position: int = 0
    pending: Sequence[int] = ()
    data: str = ""
    """Fingerprint of the training data that these positions belong to."""
    lengths: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """State of `rlpipe.generation.length_history.LengthHistory`."""

    @property
    def first_row(self) -> int:
        """Number of the first row that is still to be written. Row 0 is the evaluation before training."""
        return self.iteration + 1 if self.iteration else 0


def checkpoint_is_due(config: Config, iteration: int) -> bool:
    """Every `checkpoint.interval_iterations`, and after the last iteration."""
    interval = config.checkpoint.interval_iterations
    return interval > 0 and (iteration == config.run.iterations or iteration % interval == 0)


def has_checkpoint(config: Config) -> bool:
    """Whether the run's folder holds a complete checkpoint."""
    return latest_checkpoint(RunDirectory.of(config).checkpoints) is not None


def load_newest(
    actor: "ActorGroup",
    directory: RunDirectory,
    say: Callable[[str], None],
    task: Callable[[str], AbstractContextManager[None]],
) -> tuple[RunState, Path]:
    """Load the newest checkpoint whose files are what was written; damaged ones are set aside, and that is said.

    task: tells what is being loaded. Raises CheckpointError when none is whole.
    """
    while (checkpoint := latest_checkpoint(directory.checkpoints)) is not None:
        try:
            with task(f"loading {checkpoint}"):
                return RunState(**actor.load_checkpoint(checkpoint)), checkpoint
        except DamagedCheckpointError as error:
            say(f"warning: {error}; passed over, and kept as {set_aside(checkpoint, 'damaged')}")
    raise CheckpointError(f"{directory.checkpoints}: no checkpoint is left to resume from; start with --overwrite")


class Checkpoints:
    """Saves the run, when it is due and when the run ends early.

    `whole` is the last state that actor, rows and driver have in common, None from the begin of an update to the end of
    its iteration.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        actor: "ActorGroup",
        during_save: Callable[[], AbstractContextManager[None]],
        console: Console,
        start: RunState,
        loaded: Path | None,
    ) -> None:
        self._grace_seconds = config.fault.grace_seconds
        self._directory = directory.checkpoints
        self._actor = actor
        self._during_save = during_save
        self._console = console
        self._saved = start.iteration if loaded else None
        self.whole: RunState | None = start

    @contextmanager
    def iteration(
        self, log: IterationLog, number: int, state_after: Callable[[int], RunState]
    ) -> Iterator[IterationRecord]:
        """The record of iteration `number`. Where a signal stops the run after `commit`, it is at the end of this."""
        with log.iteration(number) as record:
            yield record
            state = state_after(number)
        self.whole = state
        raise_if_requested()

    def commit(self, record: IterationRecord) -> None:
        """The policy is about to change: from here on a signal lets the iteration end, so that it can be saved."""
        self.whole = None
        record.finish_despite_signals(self._grace_seconds)

    def save(self, state: RunState) -> None:
        """In the background."""
        with self._during_save():
            self._actor.save_checkpoint(self._directory, state.iteration, asdict(state))
        self._saved = state.iteration

    @contextmanager
    def saved_before_early_end(self, interrupt: Callable[[], None] = lambda: None) -> Iterator[None]:
        """When a signal or an error that leaves the actor whole ends the block, save first what is whole, within
        `fault.grace_seconds` of the signal. `interrupt` ends what may be in the way."""
        try:
            yield
        except ActorLostError:
            raise
        except (RlpipeError, KeyboardInterrupt) as error:
            if self._grace_seconds and (isinstance(error, KeyboardInterrupt) or self._actor.answering):
                self._save_whole(interrupt)
            raise

    def _save_whole(self, interrupt: Callable[[], None]) -> None:
        try:
            with finishing(self._grace_seconds):
                if self.whole is not None and self._saved != self.whole.iteration:
                    self._console.say(f"saving iteration {self.whole.iteration} ...")
                    interrupt()
                    self.save(self.whole)
                self._actor.finish_checkpoint()
        except (RlpipeError, KeyboardInterrupt) as error:
            reason = str(error).partition("\n")[0] or f"it took longer than {self._grace_seconds:g} seconds"
            self._console.say(f"no checkpoint of this moment: {reason}")
