"""The monitor against real recompilations by TorchDynamo, and its rules, watchdog and guards."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlpipe.config.jit import JitConfig
from rlpipe.jit_monitor import (
    JitAlarm,
    JitEvent,
    JitMonitor,
    JitReport,
    JitSettings,
    cache_environment,
    host_integer,
    jit_metrics,
    refuse_alarms,
    refuse_recompiling_flash_attention,
)
from rlpipe.jit_monitor.alarms import AlarmRules
from rlpipe.jit_monitor.caches import grown_caches
from rlpipe.jit_monitor.event_file import EventFile, EventFolder
from rlpipe.jit_monitor.jit_metrics import slowest_seconds
from rlpipe.jit_monitor.recorder import Recorder
from rlpipe.jit_monitor.watchdog import Watchdog, running_compilers
from rlpipe.monitoring.metric_dictionary import check_names
from rlpipe.shared.errors import ActorError, JitError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed():
    monitors = []

    def install(**settings):
        monitors.append(JitMonitor.install(JitSettings(**settings), rank=3))
        return monitors[-1]

    yield install
    for monitor in monitors:
        monitor.uninstall()
    torch._dynamo.reset()


def _planted_kernel(x, length):
    return x * length


def _run_steps(monitor, steps, kernel):
    """`kernel` is compiled for each new Python number, as if a length were part of its cache key."""
    reports = []
    for step in range(steps):
        with monitor.step(step), monitor.phase("forward"):
            kernel(torch.ones(2), 1.5 + step)
        reports.append(monitor.drain())
    return reports


def _recompiling_kernel():
    torch._dynamo.reset()
    return torch.compile(_planted_kernel, backend="eager", dynamic=False)


def test_a_recompiling_kernel_is_named(installed):
    monitor = installed(warmup_steps=1, recompiles_limit=3)
    with torch._dynamo.config.patch(specialize_float=True):
        reports = _run_steps(monitor, 6, _recompiling_kernel())
    assert [report.compiles for report in reports] == [1] * 6
    assert reports[0].alarms == ()
    assert [report.alarms[0].recompiling for report in reports[1:]] == [False, False, False, True, True]
    last = reports[-1].alarms[0]
    assert "_planted_kernel" in last.name and "test_jit_monitor.py" in last.name
    assert (last.kind, last.count, last.total, last.step) == ("dynamo", 1, 5, 5)
    assert "cache key changes with every call" in str(last) and "_planted_kernel" in str(last)


def test_events_know_phase_and_step_and_take_time(installed):
    monitor = installed()
    with torch._dynamo.config.patch(specialize_float=True):
        report = _run_steps(monitor, 3, _recompiling_kernel())[2]
    (event,) = report.events
    assert (event.phase, event.step, event.kind, event.compiled) == ("forward", 2, "dynamo", True)
    assert 0 < event.seconds == report.seconds == report.seconds_by_phase["forward"]
    assert event.key.endswith("/2")


def test_a_kernel_that_matches_its_cache_is_silent(installed):
    monitor = installed()
    kernel = _recompiling_kernel()
    for step in range(4):
        with monitor.step(step):
            kernel(torch.ones(2), 2.5)
        report = monitor.drain()
    assert report.events == report.alarms == ()


def test_strict_runs_stop_with_the_kernel_s_name(installed):
    monitor = installed(warmup_steps=2)
    with torch._dynamo.config.patch(specialize_float=True):
        *expected, unexpected = _run_steps(monitor, 3, _recompiling_kernel())
    refuse_alarms(expected)
    with pytest.raises(JitError, match=r"actor-3: dynamo compiled.*_planted_kernel.*in step 2"):
        refuse_alarms([unexpected])


def test_hooks_survive_a_reset_of_dynamo_and_are_taken_back(installed):
    monitor = installed()
    with torch._dynamo.config.patch(specialize_float=True):
        kernel = _recompiling_kernel()  # resets dynamo, which drops all callbacks
        assert _run_steps(monitor, 1, kernel)[0].compiles == 1
        monitor.uninstall()
        kernel(torch.ones(2), 77.5)
    assert monitor.recorder.drain() == ()
    assert JitMonitor.current() is None


def test_a_run_s_monitor_is_as_the_section_says():
    settings = JitSettings.of(JitConfig(warmup_iterations=4, stall_factor=3.0, stall_minimum_seconds=2.0))
    assert settings == JitSettings(
        warmup_steps=5, recompiles_limit=3, stall_factor=3.0, stall_minimum_seconds=2.0, sample_seconds=0.5
    )


def test_one_monitor_a_process(installed):
    assert JitMonitor.current() is None
    assert installed() is JitMonitor.current()
    with pytest.raises(RuntimeError, match="installed in this process already"):
        JitMonitor.install()


def test_first_use_of_a_communicator_counts_once(installed):
    monitor = installed()
    for _ in range(3):
        with monitor.first_use("tensor", "all_reduce"):
            time.sleep(0.002)
    with monitor.first_use("expert", "all_reduce"):
        pass
    report = monitor.drain()
    assert [event.name for event in report.events] == ["tensor.all_reduce", "expert.all_reduce"]
    assert report.events[0].seconds >= 0.002
    assert report.compiles == 0


def test_nested_time_is_counted_once():
    now = [0.0]
    recorder = Recorder(clock=lambda: now[0])
    with recorder.span("triton_autotune", "outer"):
        now[0] += 4.0
        recorder.record("triton", "told", "", 3.0, compiled=True)
        with recorder.span("tilelang", "inner"):
            now[0] += 2.0
        now[0] += 1.0
    events = [(event.name, event.seconds, event.within) for event in recorder.drain()]
    assert events == [
        ("told", 3.0, "triton_autotune"),
        ("inner", 2.0, "triton_autotune"),
        ("outer", 2.0, ""),  # of its 7 seconds, 5 belong to the events inside
    ]


def test_a_span_may_end_on_another_thread():
    recorder = Recorder()
    span = recorder.open("dynamo", "function")
    thread = threading.Thread(target=recorder.close, args=(span,), kwargs={"compiled": True})
    thread.start()
    thread.join()
    recorder.record("triton", "later", "", 1.0, compiled=True)
    assert [(event.name, event.within) for event in recorder.drain()] == [("function", ""), ("later", "")]


def test_events_of_the_autograd_thread_belong_to_the_current_phase(installed):
    monitor = installed()
    with monitor.step(7), monitor.phase("backward"):
        thread = threading.Thread(target=lambda: monitor.recorder.record("triton", "k", "", 1.0, compiled=True))
        thread.start()
        thread.join()
    (event,) = monitor.drain().events
    assert (event.phase, event.step) == ("backward", 7)


def test_a_stalled_step_is_dumped_once():
    dumped = []
    watchdog = Watchdog(factor=3, minimum_seconds=0.0, interval_seconds=0.01, on_stall=dumped.append)
    try:
        for step in range(3):
            watchdog.begin(step)
            time.sleep(0.03)
            watchdog.end()
        watchdog.begin(9)
        _a_function_that_hangs(lambda: any(stall.step == 9 for stall in dumped))
        watchdog.end()
    finally:
        watchdog.stop()
    stalls = watchdog.drain()[0]
    assert stalls == tuple(dumped)
    (stall,) = [stall for stall in stalls if stall.step == 9]  # a loaded machine may have made one before it slow, too
    assert "_a_function_that_hangs" in stall.stacks
    assert "step 9 has been running for" in str(stall)


def _a_function_that_hangs(done):
    deadline = time.perf_counter() + 20
    while not done() and time.perf_counter() < deadline:
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_compiler_processes_are_seen(tmp_path, installed):
    """A program by the name of nvcc, started by a child: no hook hears of it."""
    compiler = tmp_path / "nvcc"
    compiler.symlink_to("/bin/sleep")
    child = subprocess.Popen(["/bin/sh", "-c", f"{compiler} 30 & echo started; wait"], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        deadline = time.perf_counter() + 10
        while running_compilers() != {"nvcc"} and time.perf_counter() < deadline:
            time.sleep(0.01)
        assert running_compilers() == {"nvcc"}
        monitor = installed(warmup_steps=0, sample_seconds=0.01)
        with monitor.step(4):
            while not monitor._watchdog._compiler_seconds and time.perf_counter() < deadline:
                time.sleep(0.01)
        report = monitor.drain()
        assert set(report.compiler_seconds) == {"nvcc"}
        assert [(alarm.kind, alarm.name) for alarm in report.alarms] == [("compiler process", "nvcc")]
    finally:
        for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split():
            subprocess.run(["kill", pid], check=True)
        child.wait()


def test_steps_are_compared_with_steps_of_their_kind(installed, monkeypatch):
    clock = [0.0]  # a busy machine would make a short step a slow one
    monkeypatch.setattr("rlpipe.jit_monitor.watchdog.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monitor = installed(sample_seconds=30)

    def step(number, kind, seconds):
        with monitor.step(number, kind):
            clock[0] += seconds

    for number in range(3):
        step(number, "logprob", 0.01)
    step(3, "train", 0.05)
    assert monitor._slow_since is None
    step(3, "logprob", 0.014)
    assert monitor._slow_since is None
    step(4, "logprob", 0.016)
    assert monitor._slow_since is not None


def test_events_of_other_processes_travel_through_files(tmp_path):
    files = [EventFile(tmp_path / "logs" / f"jit_engine_0_{rank}.jsonl") for rank in (0, 1)]
    recorder = Recorder()
    recorder.on_event = files[0].append
    folder = EventFolder(tmp_path / "logs", "jit_engine_0_*.jsonl")
    assert folder.read("rollout", 1) == ()
    recorder.record("triton", "first", "k", 1.5, compiled=True)
    assert recorder.drain() == ()
    files[1].append(JitEvent("triton", "other", "", 0.5, False, "", "load", 0))
    assert [(event.name, event.phase, event.step) for event in folder.read("rollout", 2)] == [
        ("first", "rollout", 2),
        ("other", "load", 2),
    ]
    recorder.record("triton", "second", "", 1.0, compiled=True)
    assert [event.name for event in folder.read("rollout", 3)] == ["second"]
    assert folder.read("rollout", 4) == ()


def test_a_full_disk_costs_events_and_no_process(tmp_path):
    """With a limit of file sizes, which the kernel enforces as it does a full disk."""
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from rlpipe.jit_monitor.event_file import EventFile\n"
        "from rlpipe.jit_monitor.events import JitEvent\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "file = EventFile(Path(sys.argv[1]))\n"
        "for n in range(99): file.append(JitEvent('triton', f'kernel {n}', '', 0.5, True, '', 'load', 0))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "engine.0.jsonl")], check=True, timeout=120)
    events = EventFolder(tmp_path, "engine.*.jsonl").read("rollout", 3)
    assert [event.name for event in events] == [f"kernel {n}" for n in range(len(events))]
    assert 1 < len(events) < 99


def test_growth_of_a_cache_that_no_hook_hears(tmp_path):
    environment = {"DG_JIT_CACHE_DIR": str(tmp_path / "dg"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    (tmp_path / "triton" / "old").mkdir(parents=True)
    (tmp_path / "dg" / "cache" / "kernel").mkdir(parents=True)
    for folder in ("triton", "triton/old", "dg", "dg/cache"):
        os.utime(tmp_path / folder, (1000, 1000))
    os.utime(tmp_path / "dg" / "cache" / "kernel", (3000, 3000))
    assert grown_caches(2000, environment) == ("deep_gemm",)
    assert grown_caches(3001, environment) == ()
    assert grown_caches(2000, {"DG_JIT_CACHE_DIR": str(tmp_path / "absent")}) == ()


def test_a_slow_step_s_caches_are_looked_at(installed, tmp_path, monkeypatch):
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    monitor = installed(sample_seconds=30)
    with monitor.step(0):
        pass
    monitor.drain()
    with monitor.step(1):
        time.sleep(0.1)
        (tmp_path / "kernel").mkdir()
    assert monitor.drain().grown_caches == ("deep_gemm",)


def test_cache_directories_are_separate_and_the_user_s_own_stay(tmp_path):
    variables = cache_environment(tmp_path, "image-h200", {"TRITON_CACHE_DIR": "/mine"})
    assert variables["TRITON_CACHE_DIR"] == "/mine"
    assert variables["TILELANG_CACHE_DIR"] == str(tmp_path / "image-h200" / "tilelang")
    assert variables["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    directories = [value for name, value in variables.items() if name.endswith(("_DIR", "_BASE"))]
    assert len(directories) == len(set(directories)) == 8


@pytest.mark.parametrize("installed_version", ["4.0.0b28", "4.0.0b30", "4.0.0", "4.1.0"])
def test_sound_flash_attention_passes(installed_version):
    refuse_recompiling_flash_attention(installed_version)


@pytest.mark.parametrize("installed_version", ["4.0.0b17.dev0+gb02b07e.d20260608", "4.0.0b27", "4.0.0b3"])
def test_recompiling_flash_attention_is_refused(installed_version):
    with pytest.raises(ActorError, match="4.0.0b28 or newer"):
        refuse_recompiling_flash_attention(installed_version)


@pytest.mark.parametrize("value", [torch.tensor(5), 5.0, True, None])
def test_lengths_of_kernels_are_host_integers(value):
    assert host_integer("max_seqlen", 5) == 5
    with pytest.raises(ActorError, match="max_seqlen is a"):
        host_integer("max_seqlen", value)


def test_an_alarm_names_the_cause_not_what_it_contains():
    """A tuning run compiles each configuration once: that is no recompiling kernel."""
    inside = [JitEvent("triton", "k", str(n), 1.0, True, "triton_autotune", "forward", 5) for n in range(4)]
    runs = [JitEvent("triton_autotune", "k", str(n), 0.5, n == 0, "", "forward", 5) for n in range(4)]
    (alarm,) = AlarmRules(warmup_steps=1, recompiles_limit=3).judge(1, 5, [*inside, *runs], {"ptxas": 1.0})
    assert (alarm.kind, alarm.count, alarm.seconds, alarm.recompiling) == ("triton_autotune", 1, 2.0, False)


def test_metrics_take_the_slowest_worker_of_each_role():
    def report(rank, seconds):
        event = JitEvent("triton", "k", "", seconds, True, "", "forward", 0)
        return JitReport(0, rank, (event,), (JitAlarm("triton", "k", 1, 1, seconds, 0, False),))

    engine = replace(report(0, 2.5), role="engine")
    metrics = jit_metrics([report(0, 1.0), report(1, 4.0), engine])
    check_names(metrics)
    assert metrics == {
        "perf/jit_seconds": 6.5,
        "perf/jit_compiles": 3.0,
        "perf/jit_alarms": 3.0,
        "perf/jit_stalls": 0.0,
    }
    assert jit_metrics([])["perf/jit_seconds"] == 0.0
    assert slowest_seconds([report(0, 1.0), report(1, 4.0)], ["forward"]) == 4.0
    assert slowest_seconds([report(0, 1.0)], ["backward"]) == 0.0


def test_installing_imports_no_kernel_library():
    code = """
import json, sys
from rlpipe.jit_monitor import JitMonitor
monitor = JitMonitor.install()
monitor.uninstall()
print(json.dumps([name for name in ("torch", "triton", "tilelang", "cutlass", "flashinfer") if name in sys.modules]))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(run.stdout) == []


def test_all_that_compiles_in_a_phase_adds_up():
    events = [JitEvent("triton", name, "", 1.5, True, "", "forward", 0) for name in ("a", "b")]
    assert JitReport(0, 0, tuple(events)).seconds_by_phase == {"forward": 3.0}
