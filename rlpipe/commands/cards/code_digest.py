"""Digests of the code that cards name: in the tree that is there, and in a commit."""

import hashlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rlpipe.shared.errors import DataError


def present_digest(root: Path, patterns: Sequence[str]) -> str:
    """Of the files below `root` that `patterns` name, as they are now; empty where a pattern names none, as in an
    installed package, which holds no sources of tests and benchmarks.

    patterns: paths below `root`; a folder stands for all files in it, and * for any characters.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        files = {str(file.relative_to(root)): _blob(file.read_bytes()) for file in _files(root, pattern)}
        if not files:
            return ""
        found |= files
    return _digest(found)


def digest_at(root: Path, commit: str, patterns: Sequence[str]) -> str:
    """The same of a commit, where a pattern may have named no file yet. Raises DataError where git does not know it."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-tree", "-r", "--full-tree", commit], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        raise DataError(f"git knows no commit {commit!r} in {root}: fetch the history, or record again")
    rows = [line.split(maxsplit=3) for line in listed.stdout.splitlines()]
    blobs = {path: blob for _, _, blob, path in rows}
    return _digest({path: blob for path, blob in blobs.items() if any(_named(path, pattern) for pattern in patterns)})


def _files(root: Path, pattern: str) -> Iterator[Path]:
    for path in [root / pattern] if "*" not in pattern else root.glob(pattern):
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in inside if file.is_file() and "__pycache__" not in file.parts)


def _named(path: str, pattern: str) -> bool:
    same_depth = path.count("/") == pattern.count("/")
    return path.startswith(f"{pattern}/") or (same_depth and fnmatchcase(path, pattern))


def _blob(content: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _digest(blobs: Mapping[str, str]) -> str:
    text = "".join(f"{path} {blob}\n" for path, blob in sorted(blobs.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
