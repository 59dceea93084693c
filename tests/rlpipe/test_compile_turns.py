"""Of processes that want the same kernels one compiles, and the others come after it, together."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from rlpipe.jit_monitor.compile_turns import after_the_first
name, seconds = sys.argv[1], float(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
with after_the_first(name) as first:
    begin = time.monotonic()
    print("first" if first else "after", flush=True)
    time.sleep(seconds)
print(begin, time.monotonic(), flush=True)
"""


@pytest.fixture
def enter(tmp_path: Path):
    """Starts a process that enters with a name and stays for so long; it has entered when this returns."""
    running: list[subprocess.Popen[str]] = []

    def start(name: str, seconds: float, waits: bool = False) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, name, str(seconds)],
            env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("\n")
        process.stdin.flush()
        if not waits:
            process.turn = process.stdout.readline().strip()  # type: ignore[attr-defined]
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


def _ended(process: subprocess.Popen[str]) -> tuple[list[str], list[float]]:
    output, _ = process.communicate(timeout=60)
    *turn, times = output.splitlines()
    return turn, [float(one) for one in times.split()]


def test_one_goes_first_and_the_others_enter_together_when_it_has_left(enter):
    first = enter("kernel", 1.0)
    others = [enter("kernel", 2.0, waits=True) for _ in range(2)]
    other_name = enter("another kernel", 0.0)
    assert first.turn == other_name.turn == "first"
    (_, (_, left)), found = _ended(first), [_ended(one) for one in others]
    assert [turn for turn, _ in found] == [["after"], ["after"]]
    begins, ends = zip(*(times for _, times in found), strict=True)
    assert left - 0.01 <= min(begins) and max(begins) < min(ends)


def test_who_waits_enters_when_the_first_has_been_killed(enter):
    first = enter("kernel", 600.0)
    other = enter("kernel", 0.0, waits=True)
    time.sleep(0.2)
    assert other.poll() is None
    first.send_signal(signal.SIGKILL)
    assert _ended(other)[0] == ["after"]


def test_nobody_waits_where_no_file_can_be_made(tmp_path, monkeypatch):
    from rlpipe.jit_monitor.compile_turns import after_the_first

    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(blocked))
    with after_the_first("kernel") as first, after_the_first("kernel") as second:
        assert first and second
