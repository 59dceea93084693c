"""What a killed engine leaves goes with the next one; what a living one uses stays."""

import os
import signal
import subprocess
import sys
import time

import psutil

from rollout import cleanup

_OWNER = """
import sys, time
from rollout.cleanup import claim_directory
folder = claim_directory(sys.argv[1])
(folder / "socket").touch()
print(folder, flush=True)
time.sleep(600)
"""


def test_only_folders_of_dead_engines_are_removed():
    owners = {}
    for instance in ("test-cleanup-dead", "test-cleanup-alive"):
        owner = subprocess.Popen([sys.executable, "-c", _OWNER, instance], stdout=subprocess.PIPE, text=True)
        folder = cleanup.engine_directory(instance)
        assert owner.stdout.readline().strip() == str(folder)
        owners[folder] = owner
    dead, alive = owners
    try:
        cleanup.remove_abandoned()
        assert (dead / "socket").exists() and (alive / "socket").exists()
        owners[dead].kill()
        owners[dead].wait()
        cleanup.remove_abandoned()
        assert not dead.exists() and (alive / "socket").exists()
    finally:
        for owner in owners.values():
            owner.kill()
            owner.wait()
        cleanup.remove_abandoned()
    assert not alive.exists()


def test_a_folder_of_somebody_else_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(cleanup, "_TEMPORARY", tmp_path)
    (tmp_path / "rlpipe-engine-without-owner").mkdir()
    cleanup.remove_abandoned()
    assert (tmp_path / "rlpipe-engine-without-owner").is_dir()


def test_an_engine_is_ended_from_outside_with_children_that_were_stopped_and_no_other():
    environment = {**os.environ, "TMPDIR": str(cleanup.engine_directory("test-cleanup-lost"))}
    command = [sys.executable, "-c", _OWNER]
    engine, other = (
        subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True)
        for name in ("test-cleanup-lost", "test-cleanup-other")
    )
    assert engine.stdout.readline() and other.stdout.readline()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
    try:
        while "TMPDIR" not in psutil.Process(child.pid).environ():
            time.sleep(0.01)  # the new program has its environment a moment after it has begun
        child.send_signal(signal.SIGSTOP)
        cleanup.end_engine(engine.pid, "test-cleanup-lost")
        engine.wait(timeout=10)  # else TimeoutExpired; they stay in the table of processes until they are waited for
        child.wait(timeout=10)
        assert not cleanup.engine_directory("test-cleanup-lost").exists()
        assert other.poll() is None and cleanup.engine_directory("test-cleanup-other").exists()
    finally:
        for process in (engine, other, child):
            process.kill()
            process.wait()
        cleanup.remove_files("test-cleanup-other")


def test_a_stopped_process_below_an_engine_is_seen():
    inner = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    engine = subprocess.Popen([sys.executable, "-c", inner], stdout=subprocess.PIPE, text=True)
    below = int(engine.stdout.readline())
    try:
        assert not cleanup.has_stopped_process(engine.pid)
        os.kill(below, signal.SIGSTOP)
        end = time.monotonic() + 5
        while not cleanup.has_stopped_process(engine.pid) and time.monotonic() < end:
            time.sleep(0.01)
        assert cleanup.has_stopped_process(engine.pid)
    finally:
        os.kill(below, signal.SIGKILL)
        engine.kill()
        engine.wait()
    assert not cleanup.has_stopped_process(engine.pid)
