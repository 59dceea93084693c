"""Compilation in SGLang's scheduler processes reaches the engine, and is an alarm after warm-up."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlpipe.config.jit import JitConfig
from rlpipe.jit_monitor import JitMonitor
from rollout.jit_watch import JitWatch, install_in_scheduler

_PROJECT = Path(__file__).parents[2]

# A child of the engine, as SGLang starts them: its hooks hear the compilations that torch announces, one for each line.
_SCHEDULER = """
import sys
from rollout.jit_watch import install_in_scheduler
install_in_scheduler()
import torch, torch._dynamo
for _ in sys.stdin:
    torch._dynamo.reset()
    torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
    print("compiled", flush=True)
"""


_WAITING_SCHEDULER = """
import time
from rollout.jit_watch import install_in_scheduler
install_in_scheduler()
def wait_in_a_named_function():
    print("ready", flush=True)
    time.sleep(600)
wait_in_a_named_function()
"""


@pytest.fixture
def watch(tmp_path, monkeypatch):
    monkeypatch.setenv("RLPIPE_JIT_EVENTS", "")
    (tmp_path / "rollout_engine_3.jit.1.jsonl").write_text("left by an earlier run\n")
    watch = JitWatch(3, tmp_path / "rollout_engine_3.log", JitConfig(warmup_iterations=1))
    yield watch
    watch.stop()


@pytest.fixture
def compile_in_scheduler(watch):
    """Compiles something in a child of this process, which `watch` hears."""
    command = [sys.executable, "-c", _SCHEDULER]
    with subprocess.Popen(command, cwd=_PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as scheduler:

        def compile_once() -> None:
            print(file=scheduler.stdin, flush=True)
            assert scheduler.stdout.readline() == "compiled\n"

        yield compile_once
        scheduler.stdin.close()


def test_what_schedulers_compile_belongs_to_the_start_then_to_an_iteration_and_then_is_an_alarm(
    watch, compile_in_scheduler
):
    compile_in_scheduler()
    start = watch.take(0)
    assert [(event.kind, event.phase, event.step) for event in start.events] == [("dynamo", "start", 0)]
    assert (start.worker, start.alarms) == ("engine-3", ())
    assert watch.take(1).events == ()
    compile_in_scheduler()
    late = watch.take(2)
    assert [(event.phase, event.step, event.compiled) for event in late.events] == [("rollout", 2, True)]
    (alarm,) = late.alarms
    assert "<lambda>" in alarm.name and alarm.step == 2


def test_a_scheduler_that_no_engine_asked_installs_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("RLPIPE_JIT_EVENTS", raising=False)
    monkeypatch.chdir(tmp_path)
    install_in_scheduler()
    assert JitMonitor.current() is None
    assert list(tmp_path.iterdir()) == []


def test_a_stretch_of_generation_that_takes_far_longer_is_dumped_with_the_scheduler_s_stacks(tmp_path, monkeypatch):
    monkeypatch.setenv("RLPIPE_JIT_EVENTS", "")
    jit = JitConfig(stall_factor=3.0, stall_minimum_seconds=0.4)
    schedulers = []
    watch = JitWatch(3, tmp_path / "rollout_engine_3.log", jit, lambda: schedulers)
    command = [sys.executable, "-c", _WAITING_SCHEDULER]
    with (tmp_path / "errors").open("w") as errors:
        scheduler = subprocess.Popen(command, cwd=_PROJECT, stdout=subprocess.PIPE, stderr=errors, text=True)
    schedulers.append(scheduler.pid)
    try:
        assert scheduler.stdout.readline() == "ready\n"
        assert watch.take(0).stalls == ()
        for _ in range(3):
            watch.begin(2)
            watch.end(2)
        time.sleep(0.6)  # nothing runs
        assert watch.take(1).stalls == ()
        watch.begin(1)
        end = time.monotonic() + 30
        while "wait_in_a_named_function" not in (tmp_path / "errors").read_text() and time.monotonic() < end:
            time.sleep(0.05)
        watch.end(1)
    finally:
        watch.stop()
        scheduler.kill()
        scheduler.wait()
    (stall,) = watch.take(2).stalls
    assert stall.elapsed_seconds > 0.4
    assert "wait_in_a_named_function" in (tmp_path / "errors").read_text()
    assert "step 2 has been running" in (tmp_path / "engine-3.stalls.txt").read_text()
