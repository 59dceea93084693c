"""Opening the folder of a run: the lock, what may be replaced or continued, what is left when nothing came of it."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.config.changes import Change, check_change_keys, config_changes
from rlpipe.config.root import Config
from rlpipe.config.save import resolved_yaml
from rlpipe.config.strict_yaml import StrictYamlError, load_yaml
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.monitoring.run_lock import run_lock
from rlpipe.shared.atomic_file import write_atomically
from rlpipe.shared.checkpoint_folder import (
    checked_state,
    complete_checkpoints,
    iteration_of,
    latest_checkpoint,
    named_checkpoint,
    read_state,
    set_aside,
    stateless_checkpoints,
    unfinished_checkpoints,
)
from rlpipe.shared.errors import CheckpointError, ConfigError, DamagedCheckpointError
from rlpipe.shared.interrupts import shielded
from rlpipe.shared.regular_file import check_regular

Say = Callable[[str], None]


@dataclass(frozen=True)
class Opening:
    """What the user asked for. `checkpoint`: name of the one to resume from; the newest whole one when None.

    `allow_changes`: keys of the configuration that may differ from the run's although they change the experiment.
    """

    resume: bool = False
    overwrite: bool = False
    checkpoint: str | None = None
    allow_changes: tuple[str, ...] = ()


@contextmanager
def open_run_directory(config: Config, opening: Opening, fingerprint: str, say: Say) -> Iterator[RunDirectory]:
    """The run's folder, made or opened to resume, locked until the block ends; the resolved configuration lies in it.

    A run that ends before it wrote a row leaves nothing but logs of its failure, and one that it was to replace stays.
    fingerprint: of the training data, compared with the one that a resumed run began with.

    Raises:
        ConfigError: the folder holds a run and neither `resume` nor `overwrite` is set, or a resumed run would become
            another experiment. CheckpointError: nothing to resume from. ResourceError: a run of this name is going on.
    """
    directory = RunDirectory.of(config)
    parents = [parent for parent in directory.path.parents if not parent.exists()]
    _make_parent(directory)
    try:
        with run_lock(directory.path):
            _restore_replaced(directory)
            if not opening.overwrite:
                check_regular(directory.path.rglob("*"))
            if opening.resume:
                changes = _allowed_changes(directory, config, opening)
                _choose_checkpoint(directory, opening, fingerprint, say)
                _say_if_nothing_is_left(directory, config, say)
                _keep_configuration(directory, config, changes, say)
                yield directory
            else:
                _make(directory, config, opening.overwrite)
                with _nothing_left_of_nothing(directory):
                    yield directory
    finally:
        for parent in parents:
            _remove_if_empty(parent)


def check_place(config: Config) -> None:
    """Raise ConfigError where the run's folder could not be made; leaves nothing."""
    directory = RunDirectory.of(config)
    missing = [parent for parent in directory.path.parents if not parent.exists()]
    try:
        _make_parent(directory)
        with tempfile.TemporaryFile(dir=directory.path.parent):
            pass
    except OSError as error:
        raise _no_place(directory, error) from None
    finally:
        for parent in missing:
            _remove_if_empty(parent)


def _make_parent(directory: RunDirectory) -> None:
    try:
        directory.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _no_place(directory, error) from None


def _no_place(directory: RunDirectory, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.directory: runs cannot be written into {str(directory.path.parent)[:200]} ({error.strerror}); choose "
        "another folder"
    )


def discard_replaced(directory: RunDirectory) -> None:
    """Call when the run has started: the one that it replaces is not needed any more."""
    shutil.rmtree(_replaced(directory), ignore_errors=True)


def _make(directory: RunDirectory, config: Config, overwrite: bool) -> None:
    if directory.config.exists():
        if not overwrite:
            raise ConfigError(
                f"{directory.path} already holds a run: continue it with --resume, replace it with --overwrite, "
                "or choose another run.name"
            )
        directory.path.rename(_replaced(directory))
    elif directory.path.exists() and not _only_logs(directory):
        raise ConfigError(f"{directory.path} exists and is no run: remove it, or choose another run.name")
    directory.path.mkdir(exist_ok=True)
    write_atomically(directory.config, resolved_yaml(config).encode())


def _only_logs(directory: RunDirectory) -> bool:
    """Whether there is no more than what a run that failed to start leaves."""
    return directory.path.is_dir() and {path.name for path in directory.path.iterdir()} <= {directory.logs.name}


@contextmanager
def _nothing_left_of_nothing(directory: RunDirectory) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        with shielded():
            if not has_begun(directory):
                _unmake(directory, keep_logs=not isinstance(error, KeyboardInterrupt))
                _restore_replaced(directory)
        raise


def has_begun(directory: RunDirectory) -> bool:
    """Whether the run has left anything that is worth keeping."""
    return directory.metrics.exists() or directory.policy.exists() or bool(complete_checkpoints(directory.checkpoints))


def _unmake(directory: RunDirectory, keep_logs: bool) -> None:
    for path in directory.path.iterdir():
        if path != directory.logs or not keep_logs:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for file in directory.logs.rglob("*"):
        if file.is_file() and file.stat().st_size == 0:
            file.unlink()
    _remove_if_empty(directory.logs)
    _remove_if_empty(directory.path)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _replaced(directory: RunDirectory) -> Path:
    return directory.path.with_name(f".{directory.path.name}.replaced")


def _restore_replaced(directory: RunDirectory) -> None:
    """Put a run back that was moved away for one that never began; remove it where that one did."""
    replaced = _replaced(directory)
    if not replaced.exists():
        return
    if has_begun(directory):
        shutil.rmtree(replaced)
        return
    if directory.path.exists():
        shutil.rmtree(directory.path)
    replaced.rename(directory.path)


def _choose_checkpoint(directory: RunDirectory, opening: Opening, fingerprint: str, say: Say) -> None:
    """Afterwards the checkpoint to resume from is the newest one; others are set aside, and what is done is said."""
    folder = directory.checkpoints
    for unfinished in unfinished_checkpoints(folder):
        say(f"passed over {unfinished}: its writing was interrupted; removed")
        shutil.rmtree(unfinished)
    for damaged in stateless_checkpoints(folder):
        say(f"warning: {damaged} has no state.json; passed over, and kept as {set_aside(damaged, 'damaged')}")
    chosen = None if opening.checkpoint is None else named_checkpoint(folder, opening.checkpoint)
    # One that was asked for by name is not replaced by another one, so it is looked at as a whole.
    state = _newest_whole_state(folder, say) if chosen is None else checked_state(chosen)
    before = state["driver"].get("data", "")
    if before and before != fingerprint and not any(key.split(".")[0] == "data" for key in opening.allow_changes):
        raise ConfigError(
            f"{directory.path}: the training data are not those that the run began with (other rows, texts or tokens "
            "in the same files): bring them back, or add --allow-change data"
        )
    for newer in complete_checkpoints(folder):
        if chosen is not None and newer > chosen:
            say(f"{newer.name} is newer than {chosen.name}, and kept as {set_aside(newer, 'superseded')}")


def _say_if_nothing_is_left(directory: RunDirectory, config: Config, say: Say) -> None:
    newest = latest_checkpoint(directory.checkpoints)
    if newest is not None and iteration_of(newest) >= config.run.iterations:
        say(f"{newest.name} is all that run.iterations = {config.run.iterations} asks for: raise it to train on")


def _newest_whole_state(folder: Path, say: Say) -> dict[str, Any]:
    while (newest := latest_checkpoint(folder)) is not None:
        try:
            return read_state(newest)
        except DamagedCheckpointError as error:
            say(f"warning: {error}; passed over, and kept as {set_aside(newest, 'damaged')}")
    raise _nothing_to_resume(folder)


def _nothing_to_resume(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder}: no complete checkpoint to resume from; start again with --overwrite, and set "
        "checkpoint.interval_iterations to save some"
    )


def _allowed_changes(directory: RunDirectory, config: Config, opening: Opening) -> list[Change]:
    """How the given configuration differs from the run's. Raises ConfigError where that makes another experiment."""
    if latest_checkpoint(directory.checkpoints) is None:
        raise _nothing_to_resume(directory.checkpoints)
    try:
        saved = load_yaml(directory.config.read_text(encoding="utf-8"))
        if not isinstance(saved, dict):
            raise StrictYamlError("it holds no sections")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{directory.config}: cannot be compared with the given configuration ({error}): write the run's "
            "configuration there, as `rlpipe config` prints it"
        ) from None
    given = load_yaml(resolved_yaml(config))
    check_change_keys(opening.allow_changes, saved, given)
    changes = config_changes(saved, given, _defaults())
    refused = [change for change in changes if not change.free and not change.allowed_by(opening.allow_changes)]
    if refused:
        keys = " ".join(f"--allow-change {change.key}" for change in refused[:5])
        shown = "; ".join(map(str, refused[:5])) + (f"; and {len(refused) - 5} more" if len(refused) > 5 else "")
        raise ConfigError(
            f"{directory.path}: with these settings --resume would go on with another experiment: {shown}; take the "
            f"old values, or add {keys}"
        )
    return changes


def _keep_configuration(directory: RunDirectory, config: Config, changes: Sequence[Change], say: Say) -> None:
    """Save the configuration that the run goes on with; the one before stays beside it."""
    if not changes:
        return
    for change in changes:
        say(f"changed since the run began: {change}")
    kept = _unused(directory.path / "config.before.yaml")
    write_atomically(kept, directory.config.read_bytes())
    write_atomically(directory.config, resolved_yaml(config).encode())
    say(f"the configuration before is kept as {kept}")


def _defaults() -> dict[str, object]:
    """What keys count as that an older or newer version of rlpipe did not know."""
    sections = {name: field.get_default(call_default_factory=True) for name, field in Config.model_fields.items()}
    known = {name: value.model_dump(mode="json") for name, value in sections.items() if hasattr(value, "model_dump")}
    return {"seed": sections["seed"], **known}


def _unused(path: Path) -> Path:
    number, found = 2, path
    while found.exists():
        found = path.with_name(f"{path.stem}.{number}{path.suffix}")
        number += 1
    return found
