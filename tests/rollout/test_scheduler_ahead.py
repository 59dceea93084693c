"""Processes that wait for their work become what multiprocessing would have spawned, or are not used at all."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import spawn
from pathlib import Path

import psutil
import pytest

from rollout.scheduler_ahead import SchedulersAhead
from tests.search_path import search_path

SPAWN = multiprocessing.get_context("spawn")
IMPORTS = ("colorsys", "no_module_of_this_name")
SECONDS = 120


@pytest.fixture(autouse=True)
def project_on_the_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", search_path(Path(__file__).parent))


def tell(pipe, event, word, reads) -> None:
    """What a spawned process knows of itself; ends with 7."""
    pipe.send((os.getpid(), word, os.environ.get(reads), "colorsys" in sys.modules, os.getcwd(), sys.argv))
    event.wait(SECONDS)
    pipe.send("done")
    sys.exit(7)


def spawned(word="hello", reads="SGLANG_WORD"):
    """A process that was spawned now and what it tells."""
    ours, theirs = SPAWN.Pipe()
    event = SPAWN.Event()
    process = SPAWN.Process(target=tell, args=(theirs, event, word, reads), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(SECONDS)
    told = ours.recv()
    event.set()
    assert ours.recv() == "done"
    process.join(SECONDS)
    assert process.exitcode == 7 and told[0] == process.pid
    return told


def waiting(ahead):
    return [one.pid for one in ahead._waiting]


def test_what_is_spawned_is_a_process_that_was_there_with_the_environment_of_now(monkeypatch):
    with SchedulersAhead(2, IMPORTS) as ahead:
        first, second = waiting(ahead)
        monkeypatch.setenv("SGLANG_WORD", "later")
        with ahead.become_spawned():
            assert spawned("one") == (first, "one", "later", True, os.getcwd(), sys.argv)
            assert spawned("two")[:4] == (second, "two", "later", True)
            third = spawned("three")
    assert third[0] not in (first, second) and third[1:] == ("three", "later", False, os.getcwd(), sys.argv)
    assert not spawned()[3]


@pytest.mark.parametrize("variable", ["LD_LIBRARY_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "SGLANG_WORD"])
def test_variables_that_packages_set_in_the_engine_are_handed_over(variable, monkeypatch):
    with SchedulersAhead(1, IMPORTS) as ahead:
        (pid,) = waiting(ahead)
        monkeypatch.setenv(variable, "set/by/a/package")
        with ahead.become_spawned():
            assert spawned(reads=variable)[:3] == (pid, "hello", "set/by/a/package")


def test_a_spawned_process_that_is_killed_is_seen_as_any_other():
    with SchedulersAhead(1, IMPORTS) as ahead, ahead.become_spawned():
        process = SPAWN.Process(target=time.sleep, args=(SECONDS,), daemon=True)
        (pid,) = waiting(ahead)
        process.start()
        assert process.pid == pid and process.is_alive()
        process.kill()
        process.join(SECONDS)
        assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("reason", ["variable", "variable that is gone", "executable", "descriptor", "killed"])
def test_one_that_would_not_be_the_same_is_left_out_and_ends(reason, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TORCH_THERE", "1")
    before = spawn.get_executable()
    high = []
    with SchedulersAhead(1, IMPORTS) as ahead:
        (pid,) = waiting(ahead)
        if reason == "variable":
            monkeypatch.setenv("LD_PRELOAD", "")
        elif reason == "variable that is gone":
            monkeypatch.delenv("TORCH_THERE")
        elif reason == "executable":
            wrapper = tmp_path / "wrapper"
            wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
            wrapper.chmod(0o700)
            spawn.set_executable(str(wrapper))
        elif reason == "descriptor":
            high = [os.open(os.devnull, os.O_RDONLY) for _ in range(300)]
        else:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        try:
            with ahead.become_spawned():
                told = spawned()
        finally:
            spawn.set_executable(before)
            for one in high:
                os.close(one)
        assert told[0] != pid and not told[3]
        (line,) = [record.getMessage() for record in caplog.records if "scheduler" in record.getMessage()]
    words = {
        "variable": "LD_PRELOAD changed",
        "variable that is gone": "TORCH_THERE changed",
        "executable": str(tmp_path / "wrapper"),
        "descriptor": "and 255 is the last",
        "killed": "is gone",
    }
    assert words[reason] in line
    assert not psutil.pid_exists(pid)


def test_none_is_left_of_an_engine_that_failed_or_was_killed():
    with pytest.raises(ValueError), SchedulersAhead(2, IMPORTS) as ahead:
        pids = waiting(ahead)
        raise ValueError
    assert not any(map(psutil.pid_exists, pids))

    program = (
        "import sys, time\n"
        "from rollout.scheduler_ahead import SchedulersAhead\n"
        f"ahead = SchedulersAhead(1, {IMPORTS})\n"
        "print(ahead._waiting[0].pid, flush=True)\n"
        "time.sleep(600)"
    )
    engine = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    left = psutil.Process(int(engine.stdout.readline()))
    engine.kill()
    engine.wait()
    gone, alive = psutil.wait_procs([left], timeout=SECONDS)
    assert not alive
