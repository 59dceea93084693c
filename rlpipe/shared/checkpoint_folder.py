"""The folder of a checkpoint: its name, when it counts as complete, which ones are kept. Pure: imports no torch.

A checkpoint is written under a hidden name. When every process has written its part, `state.json` with the size and
the checksum of every file is added and the folder gets its final name in one rename; so a folder with a final name is
complete. What is taken out of the list is renamed first, so that no half-removed folder has a final name either.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from rlpipe.shared.atomic_file import sync_folder, write_atomically
from rlpipe.shared.errors import CheckpointError, DamagedCheckpointError
from rlpipe.shared.regular_file import read_regular

_NAME = re.compile(r"iteration_(\d{8})")
_UNFINISHED = re.compile(r"\.iteration_\d{8}\.partial")
_STATE = "state.json"
_FORMAT = 2
_READ_BYTES = 8 * 2**20
_CHECKED_AT_A_TIME = 4


def checkpoint_path(directory: Path, iteration: int) -> Path:
    """The final name of the checkpoint of `iteration`."""
    return directory / f"iteration_{iteration:08d}"


def iteration_of(final: Path) -> int:
    """Of which iteration the checkpoint with this name is."""
    return int(final.name.rpartition("_")[2])


def partial_path(final: Path) -> Path:
    """The name that a checkpoint has while it is written."""
    return final.with_name(f".{final.name}.partial")


def complete_checkpoints(directory: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name) and (path / _STATE).is_file())


def stateless_checkpoints(directory: Path) -> list[Path]:
    """Folders with a checkpoint's final name that have lost their state, which a complete one has; oldest first."""
    found = directory.glob("iteration_*") if directory.is_dir() else ()
    return sorted(path for path in found if _NAME.fullmatch(path.name) and not (path / _STATE).is_file())


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint of a run; None where there is none."""
    found = complete_checkpoints(directory)
    return found[-1] if found else None


def unfinished_checkpoints(directory: Path) -> list[Path]:
    """Folders of saves that were interrupted."""
    found = (path for path in directory.glob(".iteration_*.partial") if _UNFINISHED.fullmatch(path.name))
    return sorted(path for path in found if path.is_dir() and not path.is_symlink())


def named_checkpoint(directory: Path, name: str) -> Path:
    """The complete checkpoint `name`: the name of its folder, or its iteration. Raises CheckpointError."""
    wanted = checkpoint_path(directory, int(name)).name if re.fullmatch(r"\d{1,8}", name) else name
    known = complete_checkpoints(directory)
    for path in known:
        if path.name == wanted:
            return path
    there = ", ".join(path.name for path in known) or "none"
    raise CheckpointError(f"{directory}: no complete checkpoint {name[:100]!r}; there are: {there}")


def set_aside(path: Path, reason: str) -> Path:
    """Take a checkpoint out of the list without removing it; returns its hidden name, which ends in `reason`."""
    hidden = path.with_name(f".{path.name}.{reason}")
    if hidden.exists():
        shutil.rmtree(hidden)
    return path.rename(hidden)


def file_checksum(path: Path) -> str:
    """XXH3 (64 bits) of a file's content, as hexadecimal digits."""
    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def publish(
    partial: Path, final: Path, state: dict[str, Any], keep: int, checksums: Mapping[str, str] | None = None
) -> None:
    """Mark a fully written folder as complete, give it its name, and remove all but the `keep` newest ones.

    checksums: of files, by their path in the folder, that whoever wrote them knows already and has synchronized.
    """
    known = checksums or {}
    files: dict[str, dict[str, int | str]] = {}
    for path in sorted(file for file in partial.rglob("*") if file.is_file()):
        name = str(path.relative_to(partial))
        if name not in known:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        files[name] = {"bytes": path.stat().st_size, "xxh3": known.get(name) or file_checksum(path)}
    content = {"format": _FORMAT, "files": files, **state}
    text = json.dumps({**content, "xxh3": _content_checksum(content)}, indent=1)
    write_atomically(partial / _STATE, text.encode())
    if final.exists():
        _remove(final)
    partial.rename(final)
    sync_folder(final.parent)
    for old in complete_checkpoints(final.parent)[:-keep]:
        _remove(old)


def read_state(path: Path) -> dict[str, Any]:
    """The `state` given to `publish`, after checking that it is what was written and every file is there in full.

    Raises:
        DamagedCheckpointError: an unfinished or damaged one.
        CheckpointError: no such checkpoint, or one of another format.
    """
    try:
        state: dict[str, Any] = json.loads(read_regular(path / _STATE))
        own, files, version = state.pop("xxh3", None), state["files"], state["format"]
        sizes = {name: file["bytes"] for name, file in files.items()} if version == _FORMAT else {}
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {_STATE} is missing; give a folder named iteration_*"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path / _STATE} is damaged ({error}): use another checkpoint") from None
    if version != _FORMAT and isinstance(version, int):
        raise CheckpointError(f"{path} has checkpoint format {version}; this version of rlpipe reads {_FORMAT}")
    if own != _content_checksum(state):
        raise DamagedCheckpointError(f"{path / _STATE} is damaged (its checksum differs): use another checkpoint")
    for name, size in sizes.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            problem = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise DamagedCheckpointError(f"checkpoint file {file} {problem}: use another checkpoint")
    return state


def checked_state(path: Path) -> dict[str, Any]:
    """`read_state`, after every byte of every file was compared with what was written; raises like it."""
    state = read_state(path)
    if damaged := damaged_files(path, state, state["files"]):
        raise DamagedCheckpointError(f"{path}: {', '.join(damaged)} differs from what was written: use another one")
    return state


def damaged_files(path: Path, state: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Those of `names` whose content is not what was written."""
    names = list(names)
    with ThreadPoolExecutor(_CHECKED_AT_A_TIME) as threads:
        found = threads.map(file_checksum, [path / name for name in names])
        return [name for name, own in zip(names, found, strict=True) if own != state["files"][name]["xxh3"]]


def _content_checksum(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def _remove(path: Path) -> None:
    shutil.rmtree(set_aside(path, "removed"))
