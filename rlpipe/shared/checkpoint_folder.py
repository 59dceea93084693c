"""The folder of a checkpoint: its name, when it counts as complete, which ones are kept. Pure: imports no torch.

A checkpoint is written under a hidden name. When every process has written its part, `state.json` with the size of
every file is added and the folder gets its final name in one rename; so a folder with a final name is complete.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from rlpipe.shared.errors import CheckpointError

_NAME = re.compile(r"iteration_(\d{8})")
_STATE = "state.json"
_FORMAT = 2


def checkpoint_path(directory: Path, iteration: int) -> Path:
    """The final name of the checkpoint of `iteration`."""
    return directory / f"iteration_{iteration:08d}"


def partial_path(final: Path) -> Path:
    """The name that a checkpoint has while it is written."""
    return final.with_name(f".{final.name}.partial")


def complete_checkpoints(directory: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name) and (path / _STATE).is_file())


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint of a run; None where there is none."""
    found = complete_checkpoints(directory)
    return found[-1] if found else None


def publish(partial: Path, final: Path, state: dict[str, Any], keep: int) -> None:
    """Mark a fully written folder as complete, give it its name, and remove all but the `keep` newest ones."""
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in partial.rglob("*") if path.is_file()}
    text = json.dumps({"format": _FORMAT, "files": sizes, **state}, indent=1)
    with (partial / _STATE).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    for old in complete_checkpoints(final.parent)[:-keep]:
        shutil.rmtree(old)


def read_state(path: Path) -> dict[str, Any]:
    """The `state` given to `publish`, after checking that every file is there in full.

    Raises:
        CheckpointError: no such checkpoint, an unfinished or damaged one, or one of another format.
    """
    try:
        state = json.loads((path / _STATE).read_text())
        sizes, version = state["files"], state["format"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {_STATE} is missing; give a folder named iteration_*"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / _STATE} is damaged ({error}): use another checkpoint") from None
    if version != _FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {version}; this version of rlpipe reads {_FORMAT}")
    for name, size in sizes.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            problem = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise CheckpointError(f"checkpoint file {file} {problem}: use another checkpoint")
    return state
