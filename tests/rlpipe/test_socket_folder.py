"""Temporary folders whose paths leave no room for sockets below them."""

import os
import tempfile
from pathlib import Path

import pytest

from rlpipe.shared.socket_folder import LONGEST_BYTES, shorten_temporary_folder, socket_folder


@pytest.fixture
def folder_of(monkeypatch):
    """Makes a temporary folder with a path of so many bytes that of the process, under the variable `name`."""
    made = []

    def folder_of(size_bytes: int, name: str = "TMPDIR") -> Path:
        made.append(Path(f"/tmp/{os.getpid()}-ä".ljust(size_bytes - 1, "x")))  # two bytes
        made[-1].mkdir(exist_ok=True)
        assert len(os.fsencode(made[-1])) == size_bytes
        monkeypatch.setenv(name, str(made[-1]))
        monkeypatch.setattr(tempfile, "tempdir", None)
        return made[-1]

    yield folder_of
    for folder in made:
        folder.rmdir()


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_with_too_long_a_path_is_replaced_and_told(name, folder_of, capsys):
    folder = folder_of(LONGEST_BYTES, name)
    shorten_temporary_folder()
    assert os.environ[name] == str(folder) and not capsys.readouterr().err
    folder = folder_of(LONGEST_BYTES + 1, name)
    shorten_temporary_folder()
    assert os.environ[name] == "/tmp"
    assert f"{name} is {folder}, too long" in capsys.readouterr().err
    assert name != "TMPDIR" or tempfile.gettempdir() == "/tmp"


def test_sockets_lie_in_the_temporary_folder_where_its_path_is_short(folder_of):
    folder = folder_of(LONGEST_BYTES)
    assert socket_folder() == folder
    assert folder_of(LONGEST_BYTES + 1) and socket_folder() == Path("/tmp")
