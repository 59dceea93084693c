"""What is said when a run ends early: its logs, its last checkpoint, how to go on, and the report of what is there."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.checkpoint_folder import latest_checkpoint
from rlpipe.shared.errors import RlpipeError
from rlpipe.shared.interrupts import shielded
from rlpipe.training.opening import has_begun


@contextmanager
def explained_end(directory: RunDirectory) -> Iterator[None]:
    """Adds the last words to whatever ends the block early. Enter it before anything is started."""
    try:
        yield
    except (RlpipeError, KeyboardInterrupt) as error:
        with shielded():
            first, line_break, rest = str(error).partition("\n")
            words = "".join(last_words(directory, interrupted=isinstance(error, KeyboardInterrupt)))
            error.args = (f"{first}{words}{line_break}{rest}",)
        raise
    except Exception as error:
        error.add_note("".join(last_words(directory)).removeprefix("; "))
        raise


def last_words(directory: RunDirectory, interrupted: bool = False) -> Iterator[str]:
    """Continues a sentence, in two parts: the second one takes seconds, as it draws the report. Logs are named if they
    stay, which those of an `interrupted` start do not."""
    checkpoint = latest_checkpoint(directory.checkpoints)
    stay = any(directory.logs.glob("**/*")) and (has_begun(directory) or not interrupted)
    logs = f"; logs: {directory.logs}" if stay else ""
    if checkpoint is not None:
        yield f"{logs}; last checkpoint: {checkpoint}; continue with --resume"
    elif has_begun(directory):
        yield f"{logs}; no checkpoint is complete yet: start again with --overwrite"
    else:
        yield f"{logs}; no iteration is complete yet: start again"
    yield _report(directory)


def _report(directory: RunDirectory) -> str:
    if not directory.metrics.exists():
        return ""
    from rlpipe.monitoring.report import write_report  # matplotlib, half a second that a start does not need

    try:
        return f"; report so far: {write_report(directory.path).page}"
    except (RlpipeError, OSError) as error:
        return f"; no report so far: {error}"
