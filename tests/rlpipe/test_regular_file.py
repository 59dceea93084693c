"""A pipe, a socket or a device in the place of a file is refused, where reading or writing would wait for ever."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlpipe.commands.run_logs import run_logs
from rlpipe.commands.run_status import run_status
from rlpipe.monitoring.json_lines import append_json_line, drop_rows_from, read_json_lines
from rlpipe.monitoring.report.history import read_history
from rlpipe.shared.checkpoint_folder import read_state
from rlpipe.shared.errors import FileKindError
from rlpipe.shared.regular_file import append_regular, check_regular, open_regular

pytestmark = pytest.mark.timeout(60)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, _folder(path.parent):
        listener.bind(path.name)


def _link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    """Paths of sockets are short."""
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.mark.parametrize("make", [_pipe, _socket, _link_to_a_device])
@pytest.mark.parametrize("use", [open_regular, append_regular, lambda path: check_regular([path])])
def test_only_files_are_opened(tmp_path: Path, make: Callable[[Path], None], use: Callable[[Path], object]) -> None:
    make(tmp_path / "x")
    with pytest.raises(FileKindError, match=r"x: is a (pipe|socket|device), and a file is needed there"):
        use(tmp_path / "x")


def test_files_are_opened_as_ever(tmp_path: Path) -> None:
    file = tmp_path / "x"
    with append_regular(file) as out:
        out.write(b"one\n")
    with append_regular(file) as out:
        out.write(b"two\n")
    with open_regular(file) as written:
        assert written.readlines() == [b"one\n", b"two\n"]
    check_regular([tmp_path, file, tmp_path / "missing"])
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path).read()


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("metrics.jsonl", lambda run: read_history(run)),
        ("metrics.jsonl", lambda run: run_status(run)),
        ("metrics.jsonl", lambda run: read_json_lines(run / "metrics.jsonl")),
        ("metrics.jsonl", lambda run: drop_rows_from(run / "metrics.jsonl", 3)),
        ("metrics.jsonl", lambda run: append_json_line(run / "metrics.jsonl", {"iteration": 1})),
        ("samples.jsonl", lambda run: read_history(run)),
        ("logs/driver.log", lambda run: list(run_logs(run, [], 5, follow=False))),
        ("state.json", lambda run: read_state(run)),
    ],
)
def test_a_pipe_in_a_run_is_refused(tmp_path: Path, name: str, use: Callable[[Path], object]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.yaml").write_text("run: {iterations: 4}\n")
    if name != "metrics.jsonl":
        append_json_line(tmp_path / "metrics.jsonl", {"iteration": 0, "time/step_seconds": 1.0})
    os.mkfifo(tmp_path / name)
    with pytest.raises(FileKindError, match=f"{name}: is a pipe"):
        use(tmp_path)
