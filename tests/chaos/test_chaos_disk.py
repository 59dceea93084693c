"""Runs whose disk is full from a named phase on: a small file system of their own, which is really full."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.chaos_schedule import DISK, FILLER, MOMENTS, Strike
from tests.chaos.chaos_support import assert_resumed, disturbed_run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """For the run's folder, with little room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("where", MOMENTS, ids=lambda where: "-".join(map(str, where)))
def test_a_full_disk_is_one_sentence_and_is_resumed(undisturbed, tmp_path, small_disk, where):
    run = disturbed_run(small_disk, [Strike(DISK, "fill", *where, 0.0)], notes=tmp_path)
    assert run.strikes
    assert run.code == 2, run.evidence
    (sentence,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert str(small_disk) in sentence, run.evidence
    assert "No space left on device" in sentence or "failed with 0.0 MB" in sentence, run.evidence
    (small_disk / FILLER).unlink()
    assert_resumed(small_disk, undisturbed())
